"""What `--help` says of every command: the names are those of the registries, and each stands for something."""

import re
from dataclasses import fields

import pytest
import torch
import typer
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from typer.testing import CliRunner

from treespec import options
from treespec.cli import app
from treespec.cli.make import ENGINE_HELP
from treespec.draft.registry import DRAFTERS as ROWS
from treespec.draft.registry import ORACLE_NAME
from treespec.eval.acceptance.config import PAPER_PRESETS
from treespec.eval.questions import INSTALLED_FILES
from treespec.eval.suites import SUITES
from treespec.heads.registry import HEAD_KINDS
from treespec.train.config import TRACKER_NAMES, TrainConfig
from treespec.train.recipes import TRAINING_BY_KIND
from treespec.trees import policy
from treespec.verify import facts
from treespec.verify.facts import VERIFIER_NAMES
from treespec.verify.registry import SCHEMES, load_verifier


def commands(group=None, name=""):
    """(name, command) of every command, those of groups too."""
    group = group or typer.main.get_command(app)
    for part, command in group.commands.items():
        full = f"{name} {part}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, full)
        else:
            yield full, command


HELP = {
    name: {parameter.name: parameter.help for parameter in command.params if hasattr(parameter, "help")}
    for name, command in commands()
}

LOSSLESS = {name for name, scheme in SCHEMES.items() if scheme.lossless}
MARKED = {name if name in LOSSLESS or name not in SCHEMES else f"{name} (lossy)" for name in VERIFIER_NAMES}
LISTS = {  # what the help of an option lists, wherever the option is
    "verifier": MARKED,
    "drafter": {row.forms[0] for row in ROWS.values() if row.name != ORACLE_NAME},
    "tree": {*options.TREE_FORMS.values(), options.TREE_FILE},
    "dtype": set(options.DTYPE_NAMES),
    "questions": {*INSTALLED_FILES, *SUITES, "a JSONL file in FastChat's format"},
    "preset": set(PAPER_PRESETS),
    "to": {f"{name} ({project})" for name, project in ENGINE_HELP.items()},
}
OTHERS = {  # options of one name and another meaning
    ("acceptance", "verifier"): {"all", *LOSSLESS},
    ("tau", "verifier"): {"all", *LOSSLESS, *facts.BEYOND_THE_NODE},
    ("tau", "tree"): {"chain:5", "2x4", "levels:3x2x1", "eagle", "medusa", "a JSON file of paths"},
    ("train", "head"): set(TRAINING_BY_KIND),
}


def listed(text):
    """The names that a line of help lists: the part with the most commas, between colons and other stops."""
    part = max(re.split(r": |; |\. |, the target answers ", text), key=lambda part: part.count(","))
    return set(re.split(r", | or ", part))


@pytest.mark.parametrize("command", HELP)
def test_help_lists_the_names_of_the_registries(command):
    for option, text in HELP[command].items():
        names = OTHERS.get((command, option)) or LISTS.get(option)
        if names:
            assert listed(text) == names, option


def test_every_list_of_names_is_shown_by_some_command():
    shown = {option for lines in HELP.values() for option in lines}
    assert LISTS.keys() <= shown
    assert all(option in HELP[command] for command, option in OTHERS)


@pytest.mark.parametrize("command", HELP)
def test_every_option_has_a_plain_line_of_help(command):
    for option, text in HELP[command].items():
        assert text, option
        assert not re.search(r"\b(so|as) many\b", text), text


def test_every_command_that_loads_a_target_may_trust_its_code():
    loading = {name for name, lines in HELP.items() if "target" in lines and "dtype" in lines}
    assert len(loading) > 10
    assert {name for name in loading if "trust_remote_code" not in HELP[name]} == set()


def test_the_names_that_help_lists_are_those_of_the_registries():
    assert {name for name, row in ROWS.items() if row.is_head} == {"head", *HEAD_KINDS}
    assert (*INSTALLED_FILES, *SUITES) == options.QUESTION_SUITES
    assert set(ENGINE_HELP) == {engine for kind in HEAD_KINDS.values() for engine in kind.engines}


def test_what_is_known_without_torch_is_what_the_parts_say():
    """The pairing rules read the facts of a scheme from a table of their own."""
    for name, scheme in SCHEMES.items():
        known_of = facts.SCHEME_INFOS[name]
        named = [field.name for field in fields(facts.SchemeInfo) if field.name not in ("loads", "options")]
        assert {part: getattr(known_of, part) for part in named} == {part: getattr(scheme, part) for part in named}
        assert list(known_of.options) == [field.name.replace("_", "-") for field in fields(scheme)]
    for name, one in facts.BEYOND_THE_NODE.items():
        verifier = load_verifier(name)
        assert verifier.name == name
        assert (one.scheme.name, one.coupled) == (verifier.scheme.name, verifier.coupled)
    assert set(TRACKER_NAMES) == set(map(str, LOGGER_TYPE_TO_CLASS))
    named = {name for training in TRAINING_BY_KIND.values() for name in training.options}
    assert named <= {field.name for field in fields(TrainConfig)}


def test_every_tree_and_precision_that_help_names_is_one():
    assert all(policy.parse_policy(form) for form in options.TREE_FORMS.values())
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in options.DTYPE_NAMES if name != "auto")


def test_options_of_one_subject_stand_under_one_heading():
    text = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).stdout
    headings = re.findall(r"─ (\w+) ─", text)
    assert headings == ["Options", "Target", "Drafting", "Answers", "Questions"]
    target = text.split("─ Target ─")[1].split("─ Drafting ─")[0]
    assert all(flag in target for flag in ("--target", "--template", "--dtype", "--device-map"))
