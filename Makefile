PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test types pages setup clean

quickstart: setup
	$(BIN)/treespec quickstart

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types
	$(BIN)/pytest -n 2 -m "not slow" --durations 20

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("treespec needs Python 3.11 or newer: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

pages: setup
	$(BIN)/python docs/scripts/pages.py

# mypy looks for treespec.heads below treespec/, where it does not lie: show it a tree of links.
types: setup
	rm -rf .venv/types && mkdir -p .venv/types/treespec
	ln -s $(CURDIR)/treespec/* $(addprefix $(CURDIR)/,heads trees train eval) .venv/types/treespec/
	cd .venv/types && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

clean:
	rm -rf .venv build *.egg-info
