"""The words of a command line: other tools' names of options are taken, and unknown ones get a hint."""

from collections.abc import Sequence
from typing import Any, final

from typer.core import TyperGroup

from treespec.engine.synonyms import find_suggestion, find_synonym
from treespec.errors import find_similar_name

# what other tools call their commands -> ours, for the hint
COMMAND_SYNONYMS = {
    "run": "chat",
    "complete": "generate",
    "bench": "eval",
    "benchmark": "eval",
    "finetune": "train",
    "convert": "export",
}


@final
class CommandGroup(TyperGroup):
    """The commands of an app. Their options also have the names that other tools give them."""

    def resolve_command(self, context: Any, words: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command of a line, and replace other tools' names of its options by ours."""
        name, command, rest = super().resolve_command(context, words)
        if command is not None:
            rest = replace_synonyms(command.params, rest)
        return name, command, rest


def list_flags(parameters: Sequence[Any]) -> dict[str, bool]:
    """The names of a command's options, such as --target; each with whether a value follows it."""
    flags = {}
    for parameter in parameters:
        for flag in [*parameter.opts, *parameter.secondary_opts]:
            flags[flag] = not getattr(parameter, "is_flag", False)
    return flags


def list_option_names(flags: Sequence[str]) -> list[str]:
    """The names of options without dashes, as in Python: max_new_tokens."""
    return [flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")]


def replace_synonyms(parameters: Sequence[Any], words: Sequence[str]) -> list[str]:
    """Replace other tools' names of options by ours: `--model x` becomes `--target x`. Values stay as they are.

    parameters: the command's.
    """
    flags = list_flags(parameters)
    names = list_option_names(list(flags))
    replaced: list[str] = []
    is_value = False  # whether the word is the value of the option before it
    for index, word in enumerate(words):
        if word == "--" and not is_value:
            return [*replaced, *words[index:]]
        flag, equals, value = word.partition("=")
        if not is_value and flag.startswith("--") and flag not in flags:
            own_name = find_synonym(flag.removeprefix("--"), names)
            if own_name is not None:
                flag = f"--{own_name.replace('_', '-')}"
        replaced.append(word)
        if not is_value:
            replaced[-1] = flag + equals + value
        is_value = not is_value and not equals and flags.get(flag, False)
    return replaced


def explain_unknown_option(flag: str, parameters: Sequence[Any]) -> str:
    """Explain that a command has no such option, and what to write instead. parameters: the command's."""
    names = list_option_names(list(list_flags(parameters)))
    hint = find_suggestion(flag.lstrip("-"), names)
    if not hint:
        hint = ": --help lists the options"
    return f"no option {flag}{hint}"


def explain_extra_words(words: str, parameters: Sequence[Any]) -> str:
    """Explain that no option takes these words of the command line. parameters: the command's."""
    explanation = f"no option takes {words!r}: a value that has spaces needs quotes"
    if "target" in [parameter.name for parameter in parameters]:
        explanation += ", and a model follows --target"
    return explanation


def explain_unknown_command(name: str, commands: Sequence[str]) -> str:
    """Explain that there is no such command, and which one may be meant."""
    own_name = COMMAND_SYNONYMS.get(name)
    if own_name not in commands:
        own_name = find_similar_name(name, commands)
    if own_name is None:
        return f"no command {name}: there are {', '.join(commands)}"
    return f"no command {name}: did you mean {own_name}?"
