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
CONFIG, FILE = "--config", "options.yaml"
WORDS = {int: "a whole number", float: "a number"}
HEADER = "# The options of a run: the same command with --config and this file repeats it.\n"


def takes(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    A field gives its option the name, the default, the help text and the heading in `--help`, which
    the class that declares it first has as PANEL. Required options come first, then the
    configuration's own. `--config FILE` gives the options that the line does not.
    """
    mro, shown = config.__mro__, {known.name: known for known in fields(config)}
    declaring = {
        name: at for at, c in enumerate(mro) for name in vars(c).get("__annotations__", ())
    }
    lines = {name: known.metadata["line"] for name, known in shown.items()}
    types = {name: line[0] | None if line else shown[name].type for name, line in lines.items()}
    parameters = []
    for name in sorted(
        shown, key=lambda name: (shown[name].default is not MISSING, declaring[name])
    ):
        if lines[name] is None:  # Python's alone
            del types[name]
            continue
        flag = "--" + name.replace("_", "-")
        flags = (
            (f"{flag}/--no-{flag[2:]}",)
            if bool in (types[name], *get_args(types[name]))
            else (flag,)
        )
        panel = vars(mro[declaring[name]]).get("PANEL")
        option = typer.Option(*flags, help=_help(shown[name]), rich_help_panel=panel)
        default = None if lines[name] else shown[name].default
        parameters.append(_keyword(name, default, Annotated[types[name], option]))

    def read_file(context: typer.Context, files: list[str] | None) -> None:
        if files and len(files) > 1:
            raise InputError(f"{CONFIG} is given {len(files)} times: leave out all but one")
        context.default_map = options_in(files[0], types) if files else None

    help = "take options from this YAML file; those on the line win"
    file = typer.Option(CONFIG, metavar="FILE", help=help, is_eager=True, callback=read_file)
    parameters.append(_keyword("config", None, Annotated[list[str] | None, file]))

    def decorate(command: Callable[[Config], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            del values["config"]
            given = {name: value for name, value in values.items() if value is not None}
            parsed = {name: lines[name][1](given[name]) for name in given if lines[name]}
            try:
                command(config(**given | parsed))
            except (typer.Exit, KeyboardInterrupt):
                leave_options(given)
                raise
            leave_options(given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
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
    if allowed.most is not None and allowed.most >= MANY:
        allowed = replace(allowed, most=None)
    return f"{help} ({allowed.bounds})"


def options_in(file: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file gives, by name, as words of the line. types: of the command's options.

    Raises InputError for a file that cannot be read, an unknown option and what is no text.
    """
    import yaml

    # 1. What the YAML file maps.
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

    # 2. Its options. The parser reads numbers, and true and false, as those of the line.
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in types:
            hint = nearest(name, types).replace("_", "-")
            raise InputError(f"{CONFIG} {file}: {key!r} is no option of this command{hint}")
        (kind,) = {*(get_args(types[name]) or [types[name]])} - {type(None)}
        several = bool(get_args(kind))
        parts = value if several and isinstance(value, list) else [value]
        if value is not None:
            if (several or kind is str) and not all(isinstance(part, str) for part in parts):
                wrong = f"{key} is {value!r}, must be text: put it in quotes"
                raise InputError(f"{CONFIG} {file}: {wrong}")
            try:
                kind(str(value)) if kind in WORDS else None
            except ValueError:
                wrong = f"{key} is {value!r}, must be {WORDS[kind]}"
                raise InputError(f"{CONFIG} {file}: {wrong}") from None
            values[name] = [*map(str, parts)] if several else str(value)
    return values


def leave_options(given: Mapping[str, object]) -> None:
    """Write the file that repeats a run beside what the run wrote to --out, if it wrote there.

    The place is OUT/options.yaml, or OUT/training/options.yaml where that folder is there. Beside
    the file OUT.json it is OUT.options.yaml. An interrupted run leaves one too, and one that was
    refused does not.
    """
    out = given.get("out")
    if not isinstance(out, str) or not (path := Path(out)).exists():
        return
    folder = path / "training" if (path / "training").is_dir() else path
    file = folder / FILE if path.is_dir() else path.with_name(f"{path.stem}.{FILE}")

    import yaml

    from treespec.files.atomic import write_text

    values = {name.replace("_", "-"): value for name, value in given.items()}
    write_text(file, HEADER + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
