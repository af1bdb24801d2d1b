"""Build a command's options from the fields of its dataclass; a YAML file may set them too:

target: org/model
max-steps: 1000
calibrate: false
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from treespec.engine.synonyms import find_suggestion, find_synonym
from treespec.errors import InputError
from treespec.options import MAX_COUNT, format_flag, get_range
from treespec.train.templates import find_template

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
CONFIG_FLAG = "--config"
NUMBER_METAVARS = {int: "INTEGER", float: "FLOAT"}
TYPE_WORDS = {int: "a whole number", float: "a number"}


def build_command(
    config: type[Config],
) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    The option takes name, default and help text from the field; its heading in `--help` is the PANEL of the class
    that declares the field first. Required options come first, then the options of `config` itself. `--config FILE`
    sets options that are not on the line.
    """
    # 1. Build a parameter for each field, except for options that only Python takes.
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
        annotation: Any = types[name]
        metavar = None
        number_type = find_number_type(field.type)
        if number_type is not None and not line:
            # Parsed here and not by typer, whose errors leave the value out.
            metavar = NUMBER_METAVARS[number_type]
            readers[name] = partial(parse_number, format_flag(name, "--"), number_type)
            annotation = str | None
            if default not in (None, MISSING):
                default = str(default)
        panel = vars(find_declaring_class(config, name)).get("PANEL")
        option = typer.Option(help=_format_help(field), rich_help_panel=panel, metavar=metavar)
        parameters.append(_build_keyword(name, default, Annotated[annotation, option]))

    # 2. Add --config.
    def read_file(context: typer.Context, files: list[str] | None) -> None:
        if files and len(files) > 1:
            raise InputError(f"{CONFIG_FLAG} is given {len(files)} times: leave out all but one")
        context.default_map = None
        if files:
            context.default_map = read_option_file(files[0], types)

    help = "take options from this YAML file; those on the line win"
    file = typer.Option(CONFIG_FLAG, metavar="FILE", help=help, is_eager=True, callback=read_file)
    parameters.append(_build_keyword("config", None, Annotated[list[str] | None, file]))

    # 3. Wrap the command.
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


def find_number_type(kind: Any) -> Any:
    """The type int or float of an option such as `int` or `int | None`; None for other types."""
    for number_type in NUMBER_METAVARS:
        if kind in (number_type, number_type | None):
            return number_type
    return None


def parse_number(flag: str, number_type: Callable[[str], float], text: str) -> float:
    """Parse an option's number. Raises InputError that names the option and the value."""
    try:
        return number_type(text)
    except ValueError:
        words = TYPE_WORDS[int]
        if number_type is float:
            words = TYPE_WORDS[float]
        raise InputError(f"{flag} is {text!r:.40}: give {words}") from None


def sort_fields(config: type["DataclassInstance"]) -> list[Field]:
    """Sort the fields that are options of the command line: required ones first, then those of `config` itself."""
    mro = config.__mro__
    shown = [field for field in fields(config) if field.metadata["line"] is not None]

    def order(field: Field) -> tuple[bool, int]:
        declaring = find_declaring_class(config, field.name)
        return field.default is not MISSING, mro.index(declaring)

    return sorted(shown, key=order)


def find_declaring_class(config: type, name: str) -> type:
    """The class that declares a field first: the last class in the MRO of `config` with that annotation."""
    declaring = config
    for base in config.__mro__:
        if name in vars(base).get("__annotations__", ()):
            declaring = base
    return declaring


def _build_keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    """Build a keyword-only parameter. default: MISSING for a required option. kind: its annotation."""
    if default is MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _format_help(field: Field) -> str:
    """Format a field's help and range. An upper end of `MAX_COUNT` is left out: no value reaches it."""
    help: str = field.metadata["help"]
    allowed = get_range(field)
    if allowed is None:
        return help
    if allowed.most is not None and allowed.most >= MAX_COUNT:
        allowed = replace(allowed, most=None)
    return f"{help} ({allowed.bounds})"


def read_option_file(file: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """Read options from a YAML file, by name, as words of the command line.

    Args:
        file: path of the YAML file.
        types: the type of each option of the command, by name.

    Raises: InputError for a file that cannot be read, an unknown option, or a value of a wrong type.
    """
    where = f"{CONFIG_FLAG} {file}"
    options: dict[str, Any] = {}
    for key, value in load_yaml(file, where).items():
        name = find_synonym(str(key), types)
        if name is None:
            hint = find_suggestion(str(key), types, flag="").replace("_", "-")
            raise InputError(f"{where}: no option {key}{hint}")
        if value is not None:
            options[name] = to_command_words(f"{where}: {key}", value, types[name])
    return options


def load_yaml(file: str, where: str) -> dict[Any, Any]:
    """Load the mapping in a YAML file, or in the training template of that name.

    where: the file's name in errors. Raises InputError.
    """
    import yaml

    try:
        content = yaml.safe_load(find_template(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"cannot read {where}: {' '.join(str(error).split())}") from error
    if not content:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{where} holds no options: write lines such as max-steps: 1000")
    return content


def to_command_words(name: str, value: Any, kind: Any) -> str | list[str]:
    """Convert an option's value in a file to words of the command line, whose parser converts them to the type.

    Args:
        name: the option's name in errors.
        value: the value in the file.
        kind: the option's type.

    Raises: InputError if the option takes a text or a number and the value is none.
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
    """Raises InputError if `text`, a part of an option's `value`, is no string: YAML reads `no` as False."""
    if not isinstance(text, str):
        raise InputError(f"{name} is {value!r}, must be text: put it in quotes")
