"""Chat conversations made from Python's standard library, which every installation carries.

A documented function becomes a request for its code and a question about what it does, a module the
question for its docstring, a topic of `help()` an explanation over several turns.
"""

import ast
import json
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import TypedDict

from treespec.errors import InputError
from treespec.options import MANY, check_ranges, option
from treespec.train.toy.kept import kept, making

SKIPPED = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "__pycache__",
}
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"

Message = dict[str, str]  # {"role": user | assistant, "content": text}


class Conversation(TypedDict):
    id: str
    messages: list[Message]


@dataclass(frozen=True)
class TextConfig:
    """Answers below `shortest` or above `longest` characters are left out; one in `held_out` conversations

    is held out.
    """

    shortest: int = option("characters of an answer, at least", 40, least=0, most=MANY)
    longest: int = option("characters of an answer, at most", 1200, least=1, most=MANY)
    held_out: int = option("hold out one conversation in N", 25, least=1, most=MANY)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


def library_files() -> list[Path]:
    """The standard library's source files, without tests and tables, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts))


def make_text(
    out: Path, files: Sequence[Path] | None = None, config: TextConfig | None = None
) -> Path:
    """Write train.jsonl and held_out.jsonl, one conversation a line, unless `out` is complete.

    files: sources to read; default: the standard library. The split depends on each conversation's
    id alone.
    Raises InputError where the files hold no conversation, and for damage in what is there.
    """
    if kept(out):
        return out
    config = config or TextConfig()
    split: dict[str, list[str]] = {TRAIN: [], HELD_OUT: []}
    for conversation in conversations(library_files() if files is None else files, config):
        held_out = zlib.crc32(conversation["id"].encode()) % config.held_out == 0
        split[HELD_OUT if held_out else TRAIN].append(json.dumps(conversation, ensure_ascii=False))
    if not split[TRAIN]:
        raise InputError(
            "no documented Python source to make conversations from; is the standard library installed?"
        )
    with making(out) as unfinished:
        for name, lines in split.items():
            (unfinished / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return out


def read_messages(file: Path) -> Iterator[list[Message]]:
    """The messages of each conversation that `make_text` wrote. Raises InputError otherwise."""
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["messages"]
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged: delete {file.parent} to make it again") from error


def conversations(files: Iterable[Path], config: TextConfig) -> Iterator[Conversation]:
    """The conversations of the files, each answer once. Files that do not parse are passed over."""
    ids: set[str] = set()
    answers: set[str] = set()
    for file in files:
        # 1. Parse.
        try:
            with warnings.catch_warnings(action="ignore"):
                source = file.read_text("utf-8")
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue

        # 2. What is documented in it, each answer and each name once.
        module = _module_name(file)
        found = _of_topics(tree, config) if file.parts[-2:] == ("pydoc_data", "topics.py") else None
        for name, turns in found or _of_module(tree, source.splitlines(), module):
            fits = [t for t in turns if config.shortest <= len(t[1]) <= config.longest]
            turns = [t for t in fits if t[1] not in answers]
            identity = f"{module}.{name}" if name else module
            if turns and identity not in ids:
                ids.add(identity)
                answers.update(answer for _, answer in turns)
                yield {"id": identity, "messages": [m for turn in turns for m in _messages(*turn)]}


Turns = list[tuple[str, str]]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _of_module(tree: ast.Module, lines: list[str], module: str) -> Iterator[tuple[str, Turns]]:
    """(name, turns) for the module itself and everything documented in it."""
    if doc := ast.get_docstring(tree):
        yield "", [(f"Explain the module {module}.", doc)]
    for name, node in _definitions(tree, ""):
        if doc := ast.get_docstring(node):
            function = "method" if "." in name else "function"
            kind = "class" if isinstance(node, ast.ClassDef) else function
            asked = f"Write a Python {kind} named {node.name}. {_first_sentence(doc)}"
            code, prose = _code(node, lines), (f"What does the {kind} {name} do?", doc)
            if zlib.crc32(name.encode()) % 2:
                yield name, [(asked, code), prose]
            else:
                yield name, [prose, (f"Show me the code of the {kind} {name}.", code)]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt):
            yield from _definitions(child, prefix)


def _code(node: Definition, lines: list[str]) -> str:
    """The definition's source without its docstring, unless that is all there is."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    doc = node.body[0]
    if len(node.body) == 1:
        return dedent("\n".join(lines[first : node.end_lineno]))
    return dedent(
        "\n".join(lines[first : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno])
    )


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0]
    return sentence if sentence.endswith(".") else f"{sentence}."


def _of_topics(tree: ast.Module, config: TextConfig) -> Iterator[tuple[str, Turns]]:
    """(name, turns) for each topic of `help()`, each turn up to `longest` characters."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                answers = [""]
                for paragraph in cleandoc(text).split("\n\n"):
                    if len(answers[-1]) + len(paragraph) > config.longest:
                        answers.append("")
                    answers[-1] = f"{answers[-1]}\n\n{paragraph}".strip()
                yield (
                    name,
                    [
                        (f"Explain {name} in Python." if not i else "Go on.", a)
                        for i, a in enumerate(answers)
                    ],
                )


def _module_name(file: Path) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = (
        file.relative_to(root).with_suffix("").parts if file.is_relative_to(root) else (file.stem,)
    )
    return ".".join(parts).removesuffix(".__init__")


def _messages(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
