"""Parts that other packages bring: by entry point, or as `module:NAME` on the command line.

All tables take them in by these functions: verifiers, trees, drafters, kinds of head and their training. A part is
found in an installed package or in the current folder. This module imports one only when a table asks for it.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, TypeVar

from treespec.errors import InputError, find_similar_name, get_first_line

Row = TypeVar("Row")
# (name on the command line, path `module:NAME`, the object there) -> the table's row, or InputError
ReadRow = Callable[[str, str, Any], Row]

PATH_PATTERN = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*(?=[:@]|$)")  # module:NAME

logger = logging.getLogger(__name__)


def find_path(text: str) -> str:
    """Find the `module:NAME` that a value begins with, as in `mine:Echo:tokens=4` and `mine:Echo@2x4`.

    Returns "" if the value begins otherwise, or if there is no such module.
    """
    match = PATH_PATTERN.match(text)
    if match is None:
        return ""
    path = match[0]
    try:
        with look_in_current_folder():
            found = find_spec(path.partition(":")[0])
    except ImportError:  # a package that it would lie in is missing
        found = None
    except Exception as error:  # the package that it lies in fails: a fault of that package
        raise InputError(f"{path}: importing it fails: {describe_fault(error)}") from error
    if found is None:
        return ""
    return path


def describe_own(text: str) -> str:
    """Describe how one's own part is written, for the error about an unknown name; and why `text` names none."""
    match = PATH_PATTERN.match(text)
    if match is None:
        return "package.module:NAME"
    return f"package.module:NAME (there is no module {match[0].partition(':')[0]})"


def load_part(path: str) -> Any:
    """Load the object `module:NAME`.

    Raises InputError if the module cannot be imported, or has no such name.
    """
    module_name, _, name = path.partition(":")
    try:
        with look_in_current_folder():
            module = import_module(module_name)
    except Exception as error:  # a stranger's module may raise anything
        raise InputError(
            f"{path}: importing {module_name} fails: {describe_fault(error)}"
        ) from error
    if not hasattr(module, name):
        hint = ""
        similar_name = find_similar_name(name, vars(module))
        if similar_name is not None:
            hint = f" (did you mean {similar_name}?)"
        raise InputError(f"{path}: {module_name} has no {name}{hint}")
    return getattr(module, name)


def describe_fault(error: BaseException) -> str:
    """Describe an error in one line: its class and its message's first line."""
    return f"{type(error).__name__}: {get_first_line(error)}"


def load_row(path: str, read: ReadRow[Row]) -> Row:
    """Load `module:NAME` as a row of a table. Raises InputError if it cannot be loaded or is of another kind."""
    return read(path, path, load_part(path))


@contextmanager
def look_in_current_folder() -> Iterator[None]:
    """Let imports look in the current folder first; later imports of the part look there last."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path and "" not in sys.path:
            sys.path.append(folder)


def load_installed_rows(table: str, read: ReadRow[Row]) -> dict[str, Row]:
    """Load the rows that installed packages add to a table, by name.

    A package declares a row as an entry point:

        [project.entry-points."treespec.drafters"]
        echo = "my_package:ECHO"

    A row that cannot be loaded is left out with a warning, so that every other name still works.

    table: such as `drafters` or `verifiers`. read: makes a row of the object that the entry point names.
    """
    rows = {}
    for point in entry_points(group=f"treespec.{table}"):
        try:
            rows[point.name] = read(point.name, point.value, point.load())
        except Exception as error:  # a stranger's module may raise anything
            where = f'{point.name} = "{point.value}" of treespec.{table}'
            logger.warning("the entry point %s is left out: %s", where, describe_fault(error))
    return rows


def describe_object(value: object) -> str:
    """Describe an object of the wrong kind: `the class Echo`, `a function`, `an int`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    article = "a"
    if kind[0] in "aeiouAEIOU":
        article = "an"
    return f"{article} {kind}"
