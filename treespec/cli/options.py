"""Commands that take a configuration dataclass: every field becomes an option."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from typing import TYPE_CHECKING, Annotated, TypeVar, get_type_hints

import typer

from treespec.cli.config_file import FromFile, repeatable
from treespec.options import MANY, range_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
FROM_FILE = inspect.Parameter(
    "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=FromFile
)


def takes(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option per field of the dataclass.

    A field gives its option the name, the default, the help text and the heading in `--help`.
    Required options come first.
    """

    def decorate(command: Callable[[Config], None]) -> Callable[..., None]:
        def run(**values: object) -> None:
            values.pop(FROM_FILE.name)  # `entry.run` has put the file's options in its place
            with repeatable(values):
                command(config(**values))

        hints = get_type_hints(config)
        shown = sorted(fields(config), key=lambda field: _place(config, field))
        parameters = [_parameter(config, field, hints[field.name]) for field in shown]
        parameters.append(FROM_FILE)
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def _parameter(config: type[Config], field: Field, kind: type) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    flags = (f"{flag}/--no-{flag[2:]}",) if kind in (bool, bool | None) else (flag,)
    option = typer.Option(*flags, help=_help(field), rich_help_panel=_panel(config, field.name))
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.default is MISSING else field.default,
        annotation=Annotated[kind, option],
    )


def _help(field: Field) -> str:
    """The field's help and its range. An end that nobody reaches is left out."""
    help: str = field.metadata["help"]
    allowed = range_of(field)
    if allowed is None:
        return help
    if allowed.most is not None and allowed.most >= MANY:
        allowed = replace(allowed, most=None)
    return f"{help} ({allowed.bounds})"


def _place(config: type, field: Field) -> tuple[bool, int]:
    """Required options first, then the configuration's own, then group by group."""
    return field.default is not MISSING, config.__mro__.index(_declaring(config, field.name))


def _panel(config: type, name: str) -> str | None:
    """The heading of the group that declares a field."""
    panel: str | None = vars(_declaring(config, name)).get("PANEL")
    return panel


def _declaring(config: type, name: str) -> type:
    """The class that declares a field first; others only change its default or text."""
    return next(
        group
        for group in reversed(config.__mro__)
        if name in vars(group).get("__annotations__", {})
    )
