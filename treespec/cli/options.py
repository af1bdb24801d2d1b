"""Commands that take a configuration dataclass: every field becomes an option."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from treespec.options import range_of


def takes(config: type) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Turn `command(config)` into a typer command with one option a field, named and defaulted by the field.

    The help is the field's metadata["help"] (`treespec.options.option`).
    """

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(config(**values))

        hints = get_type_hints(config)
        parameters = []
        for field in fields(config):
            allowed = range_of(field)
            help = field.metadata.get("help", "") + (f" ({allowed.bounds})" if allowed else "")
            flag = "--" + field.name.replace("_", "-")
            flags = (f"{flag}/--no-{flag[2:]}",) if hints[field.name] is bool else (flag,)
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=Annotated[hints[field.name], typer.Option(*flags, help=help)],
                )
            )
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
