"""A command's options from its dataclass, and from a YAML file: every field is one of each.

target: org/model
max-steps: 1000
calibrate: false
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from treespec.errors import InputError
from treespec.options import MAX_COUNT, find_nearest_name, get_range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
CONFIG_FLAG = "--config"
TYPE_WORDS = {int: "a whole number", float: "a number"}


def build_command(
    config: type[Config],
) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    A field gives its option the name, the default, the help text and the heading in `--help`, which
    the class that declares it first has as PANEL. Required options come first, then the
    configuration's own. `--config FILE` gives the options that the line does not.
    """
    # 1. A parameter for each field, but for those of Python alone.
    readers: dict[str, Callable[[Any], Any]] = {}
    types: dict[str, Any] = {}
    parameters = []
    for field in sort_fields(config):
        name = field.name
        default = field.default
        types[name] = field.type
        line = field.metadata["line"]
        if line:
            kind, readers[name] = line
            types[name] = kind | None
            default = None
        panel = vars(find_declaring_class(config, name)).get("PANEL")
        option = typer.Option(help=_format_help(field), rich_help_panel=panel)
        parameters.append(_build_keyword(name, default, Annotated[types[name], option]))

    # 2. The file.
    def read_file(context: typer.Context, files: list[str] | None) -> None:
        if files and len(files) > 1:
            raise InputError(f"{CONFIG_FLAG} is given {len(files)} times: leave out all but one")
        context.default_map = None
        if files:
            context.default_map = read_option_file(files[0], types)

    help = "take options from this YAML file; those on the line win"
    file = typer.Option(CONFIG_FLAG, metavar="FILE", help=help, is_eager=True, callback=read_file)
    parameters.append(_build_keyword("config", None, Annotated[list[str] | None, file]))

    # 3. The command.
    def decorate(command: Callable[[Config], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            del values["config"]
            options = {}
            for name, value in values.items():
                if value is None:
                    continue
                if name in readers:
                    value = readers[name](value)
                options[name] = value
            command(config(**options))

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run).update(__signature__=inspect.Signature(parameters), __wrapped__=command)
        return run

    return decorate


def sort_fields(config: type["DataclassInstance"]) -> list[Field]:
    """The fields that are options of the command line: required ones first, then the config's own."""
    mro = config.__mro__
    shown = [field for field in fields(config) if field.metadata["line"] is not None]

    def order(field: Field) -> tuple[bool, int]:
        declaring = find_declaring_class(config, field.name)
        return field.default is not MISSING, mro.index(declaring)

    return sorted(shown, key=order)


def find_declaring_class(config: type, name: str) -> type:
    """The class that declares a field first: of the bases that do, the one furthest from `config`."""
    declaring = config
    for base in config.__mro__:
        if name in vars(base).get("__annotations__", ()):
            declaring = base
    return declaring


def _build_keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    if default is MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _format_help(field: Field) -> str:
    """The field's help and its range. An end that nobody reaches is left out."""
    help: str = field.metadata["help"]
    allowed = get_range(field)
    if allowed is None:
        return help
    if allowed.most is not None and allowed.most >= MAX_COUNT:
        allowed = replace(allowed, most=None)
    return f"{help} ({allowed.bounds})"


def read_option_file(file: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file gives, by name, as words of the line. types: of the command's options.

    Raises InputError for a file that cannot be read, an unknown option and what is no text.
    """
    where = f"{CONFIG_FLAG} {file}"
    options: dict[str, Any] = {}
    for key, value in load_yaml(file, where).items():
        name = str(key).replace("-", "_")
        if name not in types:
            hint = find_nearest_name(name, types).replace("_", "-")
            raise InputError(f"{where}: {key!r} is no option of this command{hint}")
        if value is not None:
            options[name] = to_command_words(f"{where}: {key}", value, types[name])
    return options


def load_yaml(file: str, where: str) -> dict[Any, Any]:
    """What a YAML file maps. where: how an error names it. Raises InputError."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"cannot read {where}: {' '.join(str(error).split())}") from error
    if not content:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{where} holds no options: write lines such as max-steps: 1000")
    return content


def to_command_words(name: str, value: Any, kind: Any) -> str | list[str]:
    """An option's value in a file as words of the line, whose parser reads numbers, true and false.

    kind: the option's type. name: how an error names it. Raises InputError for what is no text or no
    number, where the option takes one.
    """
    if NoneType in get_args(kind):  # as in `int | None`
        kind = get_args(kind)[0]
    if kind == list[str]:
        texts = [value]
        if isinstance(value, list):
            texts = value
        for text in texts:
            check_yaml_text(name, text, value)
        return texts
    if kind is str:
        check_yaml_text(name, value, value)
    if kind in TYPE_WORDS:
        try:
            kind(str(value))
        except ValueError:
            raise InputError(f"{name} is {value!r}, must be {TYPE_WORDS[kind]}") from None
    return str(value)


def check_yaml_text(name: str, text: object, value: object) -> None:
    """Raises InputError for an option whose value has a part that is no text: YAML reads `no` as False."""
    if not isinstance(text, str):
        raise InputError(f"{name} is {value!r}, must be text: put it in quotes")
