PYTHON ?= python3
BIN := .venv/bin
# Other projects' packages, which want other versions than treespec's, on top of those of .venv.
UPSTREAM := .venv/upstream
INSTALL = $(BIN)/python -m pip --python $(UPSTREAM)/bin/python install --quiet --disable-pip-version-check -c constraints.txt
TESTS = $(BIN)/pytest -n 2 -m "not slow"
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: quickstart test test-threads test-dtype test-products test-install kernels-check upstream types pages wheel setup clean

quickstart: setup
	$(BIN)/treespec quickstart

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types
	$(TESTS) --durations 20

# The suite again, with what a program may have set before it calls treespec: threads, which change no bit, and torch's
# default dtype.
test-threads: setup
	TEST_THREADS=3 $(TESTS)

test-dtype: setup
	TEST_DTYPE=float64 $(TESTS)

# What `test` takes a covering set of, and a plain install.
PRODUCTS = $(addprefix tests/test_,auto.py doctor.py engine.py enumerated.py every_model.py interrupts.py kernels.py long_texts.py \
	output_path.py pictures.py recurrent.py same_text.py several_models.py train.py)

test-products: setup
	$(BIN)/pytest -n 2 -m slow $(PRODUCTS) --deselect "tests/test_same_text.py::test_completions_of_mt_bench_in_bfloat16_are_those_without_drafts"

# The wheel of these sources, without extras, in a folder of its own: every command runs.
test-install: setup
	$(BIN)/pytest -m slow tests/test_plain_install.py

# The C kernels, under sanitizers, by each compiler and instruction set that is installed.
kernels-check:
	tests/kernels/check.sh

# Without the package the tests are skipped, and pytest says so.
upstream: setup
	@$(MAKE) --no-print-directory $(UPSTREAM)/ready || echo "upstream: speculators and specforge could not be installed, as pip says above: its tests are skipped"
	$$(test -e $(UPSTREAM)/ready && echo $(UPSTREAM) || echo .venv)/bin/python -m pytest -rs tests/test_upstream.py

$(UPSTREAM)/ready: Makefile constraints.txt .venv/ready
	rm -rf $(UPSTREAM)
	$(BIN)/python -m venv --without-pip $(UPSTREAM)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > $$($(UPSTREAM)/bin/python -c $(PURELIB))/beside.pth
	$(INSTALL) datasets loguru pydantic-settings
	$(INSTALL) --no-deps speculators hs-connectors specforge
	touch $@

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("treespec needs Python 3.11 or newer: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip uninstall --quiet --quiet --yes treespec && rm -rf treespec.egg-info # treespec-llm under its earlier name
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

pages: setup
	$(BIN)/python docs/scripts/pages.py

# What a release uploads, in dist; and a plain install of it in a fresh environment runs every command.
wheel: setup
	rm -rf dist .venv/wheel
	$(BIN)/python -m venv .venv/wheel
	.venv/wheel/bin/pip install --quiet --disable-pip-version-check build twine
	.venv/wheel/bin/python -m build --outdir dist
	.venv/wheel/bin/twine check --strict dist/*
	$(BIN)/pytest -m slow tests/test_plain_install.py tests/test_kernel_build.py $(PRODUCTS)

# mypy looks for treespec.heads below treespec/, where it does not lie: show it a tree of links.
types: setup
	rm -rf .venv/types && mkdir -p .venv/types/treespec
	ln -s $(CURDIR)/treespec/* $(addprefix $(CURDIR)/,heads trees train eval) .venv/types/treespec/
	cd .venv/types && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

clean:
	rm -rf .venv build dist *.egg-info
