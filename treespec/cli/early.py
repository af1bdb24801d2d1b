"""Check names, paths and small files before torch or a model is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.api.options import ModelOptions
from treespec.cli.terminal import show_notice
from treespec.demo.known import is_demo
from treespec.draft.preflight import check_there
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError, find_similar_name
from treespec.model.folder import check_model_files, resolve_model

if TYPE_CHECKING:
    from treespec.api.options import TargetOptions
    from treespec.eval.acceptance.config import AcceptanceConfig

MOST_READ = 1 << 26  # bytes of a data file that is checked early: a JSON list is read as a whole


def check_inputs_early(
    options: "TargetOptions | AcceptanceConfig",
    drafters: Sequence[str] = (),
    words: bool = True,
    chats: bool = False,
) -> None:
    """Check options and files before any weights are loaded, and show a notice that loading begins.

    Args:
        options: target, template and placement.
        drafters: values of `--drafter`. Default: ().
        words: whether the target needs a tokenizer. Default: True.
        chats: whether the target needs a chat template. Default: False.

    Raises: InputError.
    """
    target = ""
    if options.target is not None:
        target = options.target
    template = options.template
    placement = options.placement
    has_files = not is_demo(target)
    if has_files:
        check_there(target, "target directory")
    for drafter in drafters:
        DrafterSpec.parse(drafter).check(find_folder(target))
    show_notice(f"loading {target} …")
    if template is not None:
        from treespec.text.templates import check_template

        check_template(None, template)
    placement.check_package()
    placement.check_device()
    if has_files:
        path = str(Path(target).expanduser())
        resolve_model(path, placement)
        needs_template = chats and template is None
        check_model_files(path, placement, words, needs_template)


def begin_answers(config: ModelOptions, words: bool = True, chats: bool = True) -> None:
    """Run `check_inputs_early` for a command that decodes, and check tree and verifier. Raises TreeError too."""
    source = config.source
    tree = config.tree
    verifier = config.verifier
    if source is None:
        refuse_unused(tree, verifier)
        check_inputs_early(config, [], words, chats)
        return
    check_inputs_early(config, [source], words, chats)
    check_pairing(source, tree, verifier, config.allow_lossy)


def refuse_unused(tree: str | None, verifier: str) -> None:
    """Raises InputError for `--tree` or `--verifier` with `--drafter none`: they would change nothing."""
    unused = []
    if tree is not None:
        unused.append(f"--tree {tree}")
    if verifier != ModelOptions.verifier:
        unused.append(f"--verifier {verifier}")
    if unused:
        raise InputError(f"{' and '.join(unused)}: --drafter none drafts nothing; leave out one")


def find_folder(target: str) -> str:
    """The directory of the demo target, once it has been fetched; any other name as it is."""
    from treespec.demo.fetch import find_fetched_folder

    if is_demo(target):
        return str(find_fetched_folder() or target)
    return target


def check_pairing(drafter: str, tree: str | None, verifier: str, allow_lossy: bool) -> None:
    """Raises InputError or TreeError for an unknown tree, verifier or drafter, or if they do not fit each other."""
    from treespec.draft.pairing import check_named
    from treespec.trees.policy import parse_policy
    from treespec.verify.facts import parse_verifier

    spec = DrafterSpec.parse(drafter)
    tree_name = spec.choose_tree(tree)
    verifier_info = parse_verifier(verifier, allow_lossy)
    tree_policy = None
    if tree_name:
        tree_policy = parse_policy(tree_name)
    check_named(spec, verifier_info, tree_policy)


def check_readable(**files: str | None) -> None:
    """Raises InputError, with the most similar name, for a missing file. text="x" stands for --text x."""
    for name, file in files.items():
        if file is None or Path(file).exists():
            continue
        path = Path(file)
        # Compared without their endings: nosuch.jsonl is not like rows.jsonl.
        names_by_stem = {neighbour.stem: neighbour.name for neighbour in path.parent.glob("*")}
        hint = ""
        similar_stem = find_similar_name(path.stem, names_by_stem)
        if similar_stem is not None:
            hint = f" (did you mean {names_by_stem[similar_stem]}?)"
        raise InputError(f"cannot read --{name} {file}: there is no such file{hint}")


def check_data(name: str, answered: bool = True) -> None:
    """Raises InputError if `--data` has no usable conversation. Hub data sets and huge files are not read yet.

    answered: as for `read_conversations`.
    """
    from treespec.text.conversations import read_conversations
    from treespec.text.sources import check_source_packages, count_source_bytes, get_hub_name
    from treespec.train.data.known import DATA_SETS

    if get_hub_name(name):
        check_source_packages(name)
    elif name not in DATA_SETS:
        check_readable(data=name)
        if (count_source_bytes(name) or 0) <= MOST_READ:
            read_conversations(name, answered, most=1)
        else:
            check_source_packages(name)


def check_text(file: str | None, name: str = "text") -> None:
    """Raises InputError for a `--text` that cannot be read. A pipe passes, since it can be read only once."""
    from treespec.text.conversations import CONVERSATION_SUFFIXES, read_content

    check_readable(**{name: file})
    if file is None or Path(file).is_fifo():
        return
    if Path(file).suffix in CONVERSATION_SUFFIXES:
        check_data(file)
    elif not read_content(file, f"--{name}").strip():
        raise InputError(f"--{name} {file} is empty: it holds no text")


def check_questions(name: str, categories: Sequence[str] = ()) -> None:
    """Raises InputError for a file without questions. A published suite and a pipe are not read yet."""
    from treespec.eval.questions import load_questions
    from treespec.eval.suites import SUITES

    if name not in SUITES and not Path(name).is_fifo():
        load_questions(name, categories)
