"""`treespec datastore build`: text that `--drafter rest:DIR` drafts from."""

from dataclasses import dataclass

import typer

from treespec.api.options import TargetOptions
from treespec.cli.early import begin, check_text
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice
from treespec.errors import InputError
from treespec.files.atomic import check_folder
from treespec.options import option

app = typer.Typer(help="Text that --drafter rest:DIR drafts from.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class DatastoreConfig(TargetOptions):
    target: str = option("target model or its tokenizer: a directory, a hub id or demo")
    data: str = option("conversations (.jsonl, .json), or plain text under any other name")
    out: str = option("folder for the datastore")


@app.callback()
def datastore() -> None:
    """A command group. `build` is its only command so far."""


@app.command()
@takes(DatastoreConfig)
def build(config: DatastoreConfig) -> None:
    """Encode text and sort its suffixes, which takes about a second per million tokens."""
    check_folder(config.out)
    check_text(config.data, "data")
    begin(config)
    import time
    from pathlib import Path

    from treespec.draft.model_free import datastore

    datastore.refuse_what_is_there(Path(config.out))
    from treespec.model.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.target, config.placement)
    if tokenizer is None:
        raise InputError(f"the target {config.target} has no tokenizer to read --data with")
    end_notice()
    started = time.perf_counter()
    texts = datastore.encoded(config.data, tokenizer, config.template, print)
    tokens = datastore.build(texts, tokenizer, config.out)
    print(
        f"{tokens} tokens in {time.perf_counter() - started:.1f} s. Draft from them with --drafter "
        f"rest:{config.out}"
    )
