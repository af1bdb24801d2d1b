"""Counts how the sources read: names, density and complexity; and lists the sources. Tests hold the counts.

`python tests/reading_counts.py` prints them; with `--names` each name and place that counts.
A count shows where to look. It does not make a line good: `(x, y)[flag]` reads no better than what it avoids.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST_WORDS = set(  # verbs, and is, has, can, to, from, as and their like
    (ROOT / "tests" / "verbs.txt").read_text(encoding="utf-8").split()
)
CONTEXT_MANAGERS = {"contextmanager", "asynccontextmanager"}
MAX_COMPLEXITY = 12
PACKAGE_FOLDERS = {"treespec": "treespec"} | {f"treespec.{name}": name for name in ("heads", "trees", "train", "eval")}


@dataclass
class Counts:
    """What the sources of one tree add up to. Lists hold what --names prints."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    tuple_assignments: int = 0
    starred: int = 0
    conditionals: int = 0
    boolean_values: int = 0
    comprehensions: int = 0
    walruses: int = 0
    functions: int = 0
    constants: int = 0
    without_verb: list[str] = field(default_factory=list)
    one_word: list[str] = field(default_factory=list)
    complex_functions: list[tuple[int, str]] = field(default_factory=list)
    definitions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def list_sources() -> Iterator[tuple[str, str, Path]]:
    """Yield (package, its folder, file) of each source file of the house."""
    for package, folder in PACKAGE_FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            yield package, folder, file


def module_name(package: str, folder: str, file: Path) -> str:
    inner = file.relative_to(ROOT / folder).with_suffix("").parts
    return ".".join([package, *(part for part in inner if part != "__init__")])


SOURCE_MODULES = {module_name(*source): source[2] for source in list_sources()}


@cache
def parse_source(file: Path) -> ast.Module:
    """The syntax tree of a file, to read only: tests ask for each several times."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_names(file: Path) -> Iterator[str]:
    """Yield `module.name` of each import of a file; none may be relative."""
    for node in ast.walk(parse_source(file)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def list_files(root: Path, pattern: str) -> list[str]:
    return subprocess.run(
        ["git", "-C", str(root), "ls-files", pattern], capture_output=True, text=True, check=True
    ).stdout.split()


def decorator_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """`property`, `contextmanager`, …: the last word of each decorator."""
    return {re.split(r"[.(]", ast.unparse(d).split("(")[0])[-1] for d in node.decorator_list}


def needs_verb(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Properties, context managers, dunders and `main` are named by other habits."""
    decorators = decorator_names(node)
    is_noun = (
        any("property" in d or d in {"setter", "getter", "deleter"} for d in decorators)
        or decorators & CONTEXT_MANAGERS
    )
    return not (is_noun or node.name.startswith("__") or node.name == "main")


def begins_with_verb(name: str) -> bool:
    first = name.strip("_").split("_")[0]
    return first in FIRST_WORDS


def complexity(node: ast.AST) -> int:
    """Paths through a function: branches, loops, conditions, comprehensions, `and`/`or`.

    Functions inside count for themselves. That is more than ruff's C901, which
    looks at statements only: what is packed into an expression has to be understood too.
    """
    total = 1
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(
            inner,
            ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.IfExp | ast.Assert | ast.match_case,
        ):
            total += 1
        elif isinstance(inner, ast.BoolOp):
            total += len(inner.values) - 1
        elif isinstance(inner, ast.comprehension):
            total += 1 + len(inner.ifs)
        waiting += ast.iter_child_nodes(inner)
    return total


def packs_values(node: ast.Assign) -> bool:
    """`a, b = x, y` (or with brackets), but not a swap."""
    if not isinstance(node.value, ast.Tuple | ast.List):
        return False
    targets = [t for t in node.targets if isinstance(t, ast.Tuple | ast.List)]
    return any({ast.unparse(e) for e in t.elts} != {ast.unparse(e) for e in node.value.elts} for t in targets)


def condition_nodes(tree: ast.AST) -> set[int]:
    """The ids of all expressions that stand inside a condition, where `and` and `or` are no values."""
    tests = [n.test for n in ast.walk(tree) if isinstance(n, ast.If | ast.While | ast.IfExp | ast.Assert)]
    tests += [test for n in ast.walk(tree) if isinstance(n, ast.comprehension) for test in n.ifs]
    return {id(inner) for test in tests for inner in ast.walk(test)}


def count_expressions(tree: ast.Module, counts: Counts) -> None:
    conditions = condition_nodes(tree)
    for node in ast.walk(tree):
        counts.statements += isinstance(node, ast.stmt)
        counts.tuple_assignments += isinstance(node, ast.Assign) and packs_values(node)
        counts.starred += isinstance(node, ast.Starred)
        counts.conditionals += isinstance(node, ast.IfExp)
        counts.boolean_values += isinstance(node, ast.BoolOp) and id(node) not in conditions
        counts.comprehensions += isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        counts.walruses += isinstance(node, ast.NamedExpr)


def count_functions(tree: ast.Module, file: str, counts: Counts) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if needs_verb(node):
            counts.functions += 1
            if not begins_with_verb(node.name):
                counts.without_verb.append(f"{node.name}  ({file}:{node.lineno})")
        if (found := complexity(node)) > MAX_COMPLEXITY:
            counts.complex_functions.append((found, f"{file}:{node.lineno} {node.name}"))


def names_defined(node: ast.stmt) -> list[str]:
    """Functions, classes and constants that a statement of a module defines; overloads define nothing."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [] if "overload" in decorator_names(node) else [node.name]
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and n.id.isupper() and len(n.id) > 1]


def count_definitions(tree: ast.Module, file: str, counts: Counts) -> None:
    for node in tree.body:
        for name in names_defined(node):
            counts.definitions[name].append(f"{file}:{node.lineno}")
            if name.isupper():
                counts.constants += 1
                if "_" not in name.strip("_"):
                    counts.one_word.append(f"{file}:{node.lineno} {name}")


def count_tree(root: Path) -> Counts:
    counts = Counts()
    for file in list_files(root, "*.py"):
        if file.startswith(("tests/", "docs/")):
            continue
        text = (root / file).read_text(encoding="utf-8")
        tree = parse_source(root / file)
        counts.files += 1
        counts.lines += text.count("\n")
        count_expressions(tree, counts)
        count_functions(tree, file, counts)
        count_definitions(tree, file, counts)
    return counts


def count_rates(counts: Counts) -> dict[str, float]:
    """The numbers that a tree is held to, by the words of the report. Rates are per 1,000 statements."""
    per_thousand = 1000 / counts.statements
    repeated = [name for name, places in counts.definitions.items() if len(places) > 1]
    return {
        "functions whose name begins with no verb": len(counts.without_verb),
        "module-level names with several definitions": len(repeated),
        "constants of one word": len(counts.one_word),
        "tuple assignments of literals": counts.tuple_assignments * per_thousand,
        "starred expressions": counts.starred * per_thousand,
        "conditional expressions": counts.conditionals * per_thousand,
        "and/or as a value": counts.boolean_values * per_thousand,
        "comprehensions": counts.comprehensions * per_thousand,
        "walruses": counts.walruses * per_thousand,
    }


def print_report(show_names: bool) -> None:
    counts = count_tree(ROOT)
    print(f"{counts.files} files, {counts.lines} lines, {counts.statements} statements, {counts.functions} functions")
    for words, number in count_rates(counts).items():
        print(f"{words}: {number:.4g}")
    print(f"functions of a complexity over {MAX_COMPLEXITY}: {len(counts.complex_functions)}")
    if not show_names:
        return
    repeated = {name: places for name, places in counts.definitions.items() if len(places) > 1}
    print_section("no verb", sorted(counts.without_verb))
    print_section("several definitions", [f"{name}: {', '.join(places)}" for name, places in sorted(repeated.items())])
    print_section("one word", counts.one_word)
    print_section("complex", [f"{found} {place}" for found, place in sorted(counts.complex_functions, reverse=True)])


def print_section(title: str, rows: list[str]) -> None:
    print(f"\n{title}:")
    for row in rows:
        print(f"  {row}")


if __name__ == "__main__":
    print_report("--names" in sys.argv)
