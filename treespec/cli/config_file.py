"""`--config FILE`: a command's options from a YAML file, and the file that repeats a run.

The file maps options to values, by their names on the line with - or _:

    target: org/model
    max-steps: 1000
    calibrate: false
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from treespec.errors import InputError
from treespec.options import nearest

Click = Any  # a command or an option of the click that typer brings along
CONFIG = "--config"
FILE = "options.yaml"
FromFile = Annotated[
    str | None,
    typer.Option(
        CONFIG, metavar="FILE", help="take options from this YAML file; those on the line win"
    ),
]
HEADER = "# The options of a run: the same command with --config and this file repeats it.\n"
WORDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def expanded(app: typer.Typer, arguments: Sequence[str]) -> list[str]:
    """The arguments with the options of --config's file in its place, before those of the line.

    The last of two options counts, so those of the line win. Raises InputError for a file that
    cannot be read, for an unknown option and for a value of another type.
    """
    # 1. The file, and the command whose options it holds.
    file, words = without_file(arguments)
    if file is None:
        return words
    command, at = command_in(typer.main.get_command(app), words)
    if command is None:  # the parser says what it lacks
        return words

    # 2. Its options as words.
    known = {p.name: p for p in command.params if p.param_type_name == "option"}
    types = get_type_hints(inspect.unwrap(command.callback))
    given: list[str] = []
    for key, value in read(file).items():
        name = str(key).replace("-", "_")
        if name not in known or f"--{name}" == CONFIG:
            hint = nearest(name, known).replace("_", "-")
            raise InputError(f"{CONFIG} {file}: {key!r} is no option of this command{hint}")
        try:
            given += as_words(known[name], types[name], value)
        except ValueError as error:
            raise InputError(f"{CONFIG} {file}: {key} is {value!r}, must be {error}") from None
    return [*words[:at], *given, *words[at:]]


def without_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that --config names, and the other arguments."""
    words, files, rest = list(arguments), [], []
    while words:
        word = words.pop(0)
        if word == CONFIG:
            files.append(words.pop(0) if words else "")
        elif word.startswith(f"{CONFIG}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(files) > 1:
        raise InputError(f"{CONFIG} is given {len(files)} times: name one file")
    if files and (not files[0] or files[0].startswith("-")):
        raise InputError(f"{CONFIG} names no file: write {CONFIG} FILE")
    return (files[0] if files else None), rest


def command_in(group: Click, words: Sequence[str]) -> tuple[Click, int]:
    """The command that the words name, and the place after its name; None for an unknown one."""
    at = 0
    while hasattr(group, "commands"):
        while at < len(words) and words[at].startswith("-"):
            at += 1
        if at == len(words):
            raise InputError(f"{CONFIG} goes with a command, as in treespec train {CONFIG} FILE")
        group, at = group.commands.get(words[at]), at + 1
    return group, at


def read(file: str) -> Mapping[object, object]:
    """What a YAML file maps. Raises InputError for a file that is none."""
    import yaml

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise InputError(f"cannot read {CONFIG} {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{CONFIG} {file} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{CONFIG} {file} holds no options: write lines such as max-steps: 1000")
    keys = [key.value.replace("-", "_") for key, _ in node.value]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"{CONFIG} {file} gives {twice[0].replace('_', '-')} twice: leave one out")
    return content


def as_words(option: Click, kind: object, value: object) -> list[str]:
    """An option with its value as on the line; nothing for null, which leaves the default.

    kind: its annotation, such as int | None. Raises ValueError, which says what the value must be.
    """
    if value is None:
        return []
    (kind,) = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    flag = next(name for name in option.opts if name.startswith("--"))
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(WORDS[bool])
        return [flag if value else option.secondary_opts[0]]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(WORDS.get(kind, "text: put it in quotes"))
    if kind is int and not isinstance(value, int):
        raise ValueError(WORDS[int])
    if kind is float:  # YAML takes 1e-4 for text
        try:
            value = float(value)
        except ValueError:
            raise ValueError(WORDS[float]) from None
    return [f"{flag}={value}"]


@contextmanager
def repeatable(options: Mapping[str, object]) -> Iterator[None]:
    """After the block, write the file that repeats a run beside what the run wrote to --out.

    An interrupted run leaves one too, and one that was refused does not.
    """
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        write(options)
        raise
    write(options)


def write(options: Mapping[str, object]) -> None:
    """Write the options that are set, if the run wrote to --out.

    The place is OUT/options.yaml, or OUT/training/options.yaml where that folder is there. Beside
    the file OUT.json it is OUT.options.yaml.
    """
    # 1. Where.
    out = options.get("out")
    if not isinstance(out, str) or not (path := Path(out)).exists():
        return
    if path.is_dir():
        training = path / "training"
        file = (training if training.is_dir() else path) / FILE
    else:
        file = path.with_name(f"{path.stem}.{FILE}")

    # 2. What.
    import yaml

    from treespec.files.atomic import write_text

    values = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    write_text(file, HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
