"""A command's options from its dataclass, and from a YAML file: every field is one of each.

target: org/model
max-steps: 1000
calibrate: false
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from treespec.errors import InputError
from treespec.options import MANY, nearest, range_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
CONFIG, FILE = "--config", "options.yaml"
HEADER = "# The options of a run: the same command with --config and this file repeats it.\n"
WORDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def takes(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    A field gives its option the name, the default, the help text and the heading in `--help`.
    Required options come first. `--config FILE` gives the options that the line does not.
    """
    shown = [known for known in fields(config) if known.metadata["line"] is not None]
    shown.sort(key=lambda known: _place(config, known))
    types = {known.name: _type(known) for known in shown}

    def decorate(command: Callable[[Config], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            values.pop("config")
            given = {name: value for name, value in values.items() if value is not None}
            parsers = {known.name: known.metadata["line"] for known in shown}
            for name, value in given.items():
                if parsers[name]:
                    given[name] = parsers[name][1](value)
            with repeatable(values):
                command(config(**given))

        def read_file(context: typer.Context, file: str | None) -> None:
            if file is not None:
                context.default_map = options_in(file, types)

        parameters = [_parameter(config, known, types[known.name]) for known in shown]
        help = "take options from this YAML file; those on the line win"
        from_file = typer.Option(
            CONFIG, metavar="FILE", help=help, is_eager=True, callback=read_file
        )
        parameters.append(_keyword("config", None, Annotated[str | None, from_file]))
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def _type(known: Field) -> Any:
    """The type of an option's words on the line; of a list, of all of them."""
    line = known.metadata["line"]
    return line[0] | None if line else known.type


def _parameter(config: type, known: Field, kind: Any) -> inspect.Parameter:
    flag = "--" + known.name.replace("_", "-")
    flags = (f"{flag}/--no-{flag[2:]}",) if kind in (bool, bool | None) else (flag,)
    panel: str | None = vars(_declaring(config, known.name)).get("PANEL")
    option = typer.Option(*flags, help=_help(known), rich_help_panel=panel)
    required = known.default is MISSING
    default = None if known.metadata["line"] else known.default
    return _keyword(
        known.name, inspect.Parameter.empty if required else default, Annotated[kind, option]
    )


def _keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _help(known: Field) -> str:
    """The field's help and its range. An end that nobody reaches is left out."""
    help: str = known.metadata["help"]
    allowed = range_of(known)
    if allowed is None:
        return help
    if allowed.most is not None and allowed.most >= MANY:
        allowed = replace(allowed, most=None)
    return f"{help} ({allowed.bounds})"


def _place(config: type, known: Field) -> tuple[bool, int]:
    """Required options first, then the configuration's own, then group by group."""
    return known.default is not MISSING, config.__mro__.index(_declaring(config, known.name))


def _declaring(config: type, name: str) -> type:
    """The class that declares a field first; others only change its default or text."""
    return next(
        group
        for group in reversed(config.__mro__)
        if name in vars(group).get("__annotations__", {})
    )


def options_in(file: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file gives, by name. types: of the command's options.

    Raises InputError for a file that cannot be read, an unknown option and a value of another type.
    """
    values = {}
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if name not in types:
            hint = nearest(name, types).replace("_", "-")
            raise InputError(f"{CONFIG} {file}: {key!r} is no option of this command{hint}")
        (kind,) = {*(get_args(types[name]) or [types[name]])} - {type(None)}
        several = get_args(kind)
        parts = value if several and isinstance(value, list) else [value]
        if value is None:
            continue
        try:
            read = [_fitting(several[0] if several else kind, part) for part in parts]
        except ValueError as error:
            raise InputError(f"{CONFIG} {file}: {key} is {value!r}, must be {error}") from None
        values[name] = read if several else read[0]
    return values


def _read(file: str) -> Mapping[object, object]:
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


def _fitting(kind: type, value: Any) -> Any:
    """A value of a file as its option's type. Raises ValueError, which says what it must be."""
    plain = isinstance(value, int if kind is int else str | int | float)
    try:
        if not plain or isinstance(value, bool) != (kind is bool):
            raise ValueError
        return kind(value)  # YAML takes 1e-4 for text
    except ValueError:
        raise ValueError(WORDS.get(kind, "text: put it in quotes")) from None


@contextmanager
def repeatable(options: Mapping[str, object]) -> Iterator[None]:
    """After the block, write the file that repeats a run beside what the run wrote to --out.

    An interrupted run leaves one too, and one that was refused does not.
    """
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        _write(options)
        raise
    _write(options)


def _write(options: Mapping[str, object]) -> None:
    """Write the options that are set, if the run wrote to --out.

    The place is OUT/options.yaml, or OUT/training/options.yaml where that folder is there. Beside
    the file OUT.json it is OUT.options.yaml.
    """
    out = options.get("out")
    if not isinstance(out, str) or not (path := Path(out)).exists():
        return
    folder = path / "training" if (path / "training").is_dir() else path
    file = folder / FILE if path.is_dir() else path.with_name(f"{path.stem}.{FILE}")

    import yaml

    from treespec.files.atomic import write_text

    values = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    write_text(file, HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
