"""The commands of `treespec datastore`, the texts that `--drafter rest:FOLDER` drafts from."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from treespec.api.options import DemoOptions, TargetOptions
from treespec.cli.early import check_data, check_inputs_early, check_text
from treespec.cli.endings import ClosingLines, judge_training_tokens, print_ending, write_command
from treespec.cli.options import build_command
from treespec.cli.terminal import end_notice
from treespec.cli.words import CommandGroup
from treespec.files.atomic import check_writable
from treespec.options import MAX_TEXT_TOKENS, option
from treespec.text.sources import FILE_ENDINGS
from treespec.train.data.known import find_data_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK_LINES = 1000  # lines of plain text that are encoded at once

app = typer.Typer(
    help="Texts that --drafter rest:FOLDER drafts from.", cls=CommandGroup, no_args_is_help=True
)
app.callback()(lambda: None)  # a group, though it has a single command


@dataclass(frozen=True, kw_only=True)
class DatastoreConfig(TargetOptions):
    data: list[str] = option(
        "conversations, as train reads them, or a file of plain text; repeat the option for several"
    )
    out: str = option("folder for the datastore; an earlier one in it is replaced")


@app.command()
@build_command(DatastoreConfig)
def build(config: DatastoreConfig) -> None:
    """Build the suffix index of texts that --drafter rest:FOLDER drafts from."""
    # 1. Check the options and files.
    from treespec.draft.lookup.datastore import DATASTORE_FILE

    file = Path(config.out).expanduser() / DATASTORE_FILE
    check_writable(file, "--out")
    for source in config.data:
        if is_plain_text(source):
            check_text(source, "data")
        else:
            check_data(source)
    check_inputs_early(config)

    # 2. Encode the texts.
    from treespec.draft.lookup.datastore import build_datastore, write_datastore
    from treespec.draft.lookup.suffix_cache import hash_vocabulary
    from treespec.model.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.target, config.placement)
    assert tokenizer is not None  # `check_inputs_early` has found it
    end_notice()
    started = time.perf_counter()
    texts: list[list[int]] = []
    for source in config.data:
        texts += encode_texts(source, tokenizer, config.template)

    # 3. Sort and write them.
    store = build_datastore(texts, len(tokenizer))
    write_datastore(store, file, hash_vocabulary(tokenizer))
    seconds = time.perf_counter() - started
    tokens = len(store.slots)
    written = f"{file.parent} holds {tokens} tokens of {len(texts)} texts, after {seconds:.1f} s"
    command = write_command("chat", DemoOptions, config, drafter=f"rest:{config.out}")
    print_ending(ClosingLines(written, judge_training_tokens(tokens), command))


def is_plain_text(source: str) -> bool:
    """Whether a source is a file of plain text: its name ends with none of the endings of files of conversations."""
    return Path(source).is_file() and not source.endswith(FILE_ENDINGS)


def encode_texts(
    source: str, tokenizer: "PreTrainedTokenizerBase", template: str | None
) -> Iterator[list[int]]:
    """Yield the tokens of each text of a source: of each conversation, or of a file of plain text.

    It prints how many conversations were used and left out.

    Args:
        source: a value of `--data`.
        tokenizer: the target's.
        template: formats conversations; None: the tokenizer's own.

    Raises: InputError for a source without usable conversations.
    """
    # 1. Plain text, in blocks of lines.
    if is_plain_text(source):
        lines = Path(source).read_text(encoding="utf-8").splitlines(keepends=True)
        tokens: list[int] = []
        for start in range(0, len(lines), BLOCK_LINES):
            block = "".join(lines[start : start + BLOCK_LINES])
            tokens += tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]
        yield tokens
        return

    # 2. Conversations.
    from treespec.text.conversations import read_conversations
    from treespec.text.encoding import encode_conversations

    conversations, read_report = read_conversations(find_data_file(source, print))
    examples, report = encode_conversations(tokenizer, conversations, template, MAX_TEXT_TOKENS)
    report.left_out += read_report.left_out
    print(f"{source}: {report}")
    for problem in read_report.problems + report.problems:
        print(f"  {problem}")
    for example in examples:
        yield example.input_ids.tolist()
