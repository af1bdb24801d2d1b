"""A command's options from its dataclass, and from a YAML file: every field is one of each.

target: org/model
max-steps: 1000
calibrate: false
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from treespec.errors import InputError
from treespec.options import MANY, nearest, range_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
CONFIG = "--config"
WORDS = {int: "a whole number", float: "a number"}


def takes(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    A field gives its option the name, the default, the help text and the heading in `--help`, which
    the class that declares it first has as PANEL. Required options come first, then the
    configuration's own. `--config FILE` gives the options that the line does not.
    """
    # 1. A parameter for each field, but for those of Python alone.
    mro = config.__mro__
    declaring = {
        name: at for at, c in enumerate(mro) for name in vars(c).get("__annotations__", ())
    }
    shown = [known for known in fields(config) if known.metadata["line"] is not None]
    shown.sort(key=lambda known: (known.default is not MISSING, declaring[known.name]))
    readers = {known.name: known.metadata["line"] for known in shown if known.metadata["line"]}
    types = dict[str, Any]()
    parameters = []
    for known in shown:
        name = known.name
        default = known.default
        types[name] = readers[name][0] | None if name in readers else known.type
        panel = vars(mro[declaring[name]]).get("PANEL")
        option = typer.Option(help=_help(known), rich_help_panel=panel)
        default = None if name in readers else default
        parameters.append(_keyword(name, default, Annotated[types[name], option]))

    # 2. The file.
    def read_file(context: typer.Context, files: list[str] | None) -> None:
        if files and len(files) > 1:
            raise InputError(f"{CONFIG} is given {len(files)} times: leave out all but one")
        context.default_map = options_in(files[0], types) if files else None

    help = "take options from this YAML file; those on the line win"
    file = typer.Option(CONFIG, metavar="FILE", help=help, is_eager=True, callback=read_file)
    parameters.append(_keyword("config", None, Annotated[list[str] | None, file]))

    # 3. The command.
    def decorate(command: Callable[[Config], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            del values["config"]
            given = {name: value for name, value in values.items() if value is not None}
            parsed = {name: readers[name][1](given[name]) for name in readers.keys() & given}
            command(config(**given | parsed))

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run).update(__signature__=inspect.Signature(parameters), __wrapped__=command)
        return run

    return decorate


def _keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _help(known: Field) -> str:
    """The field's help and its range. An end that nobody reaches is left out."""
    help: str = known.metadata["help"]
    allowed = range_of(known)
    if allowed is None:
        return help
    most = None if allowed.most is None or allowed.most >= MANY else allowed.most
    return f"{help} ({replace(allowed, most=most).bounds})"


def options_in(file: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file gives, by name, as words of the line. types: of the command's options.

    Raises InputError for a file that cannot be read, an unknown option and what is no text.
    """
    import yaml

    # 1. What the YAML file maps.
    where = f"{CONFIG} {file}"
    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"cannot read {where}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"{where} holds no options: write lines such as max-steps: 1000")

    # 2. Its options. The parser reads numbers, and true and false, as those of the line.
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in types:
            hint = nearest(name, types).replace("_", "-")
            raise InputError(f"{where}: {key!r} is no option of this command{hint}")
        if value is None:
            continue
        (kind,) = {*(get_args(types[name]) or [types[name]])} - {type(None)}
        several = bool(get_args(kind))
        parts = value if several and isinstance(value, list) else [value]
        if (several or kind is str) and not all(isinstance(part, str) for part in parts):
            raise InputError(f"{where}: {key} is {value!r}, must be text: put it in quotes")
        try:
            kind(str(value)) if kind in WORDS else None
        except ValueError:
            raise InputError(f"{where}: {key} is {value!r}, must be {WORDS[kind]}") from None
        values[name] = parts if several else str(value)
    return values
