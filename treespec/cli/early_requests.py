"""Check a request before torch is loaded: its grammar, its token ids and the length of its prompts.

What only the loaded target tells, such as the tokens of a chat template, is checked again with the request itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from treespec.api.options import TargetOptions
from treespec.cli.early import find_folder
from treespec.draft.preflight import read_config_number
from treespec.errors import InputError, TooLong
from treespec.options import format_flag
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS, check_syntax

TEMPLATE_SLACK = 8  # tokens that a template may save by joining its text with the message's


def check_request(config: TargetOptions, texts: Sequence[str] = ()) -> None:
    """Check what a request asks for by small files of the target. Weights are not read.

    Args:
        config: a command's options; those of a grammar or of biases are checked if it has them.
        texts: the messages or prompts. Default: (), they are not known yet.

    Raises: InputError for a bad grammar, a biased token that there is not, and a prompt longer than the context.
    """
    for kind in GRAMMAR_KINDS:
        source = getattr(config, kind, None)
        if source is not None:
            try:
                check_syntax(kind, source)
            except InputError as error:
                flag = format_flag(kind, "--")
                raise InputError(str(error).replace(kind, flag, 1)) from error
    folder = Path(find_folder(config.target)).expanduser()
    if config.placement.gguf is not None or not folder.is_dir():
        return
    check_biases(getattr(config, "logit_bias", None), folder)
    for text in texts:
        check_length(text, folder)


def check_biases(biases: Mapping[int, float] | None, folder: Path) -> None:
    """Raises InputError for a token id outside of the vocabulary. biases: as `LogitOptions.logit_bias`."""
    vocab_size = read_config_number(str(folder), "vocab_size")
    if not biases or vocab_size is None:
        return
    largest = max(biases)
    if largest >= vocab_size:
        raise InputError(
            f"--logit-bias has token id {largest}, the target's vocabulary has {vocab_size:,} tokens"
        )


def check_length(text: str, folder: Path) -> None:
    """Raises TooLong for a text of more tokens than the target's context holds."""
    context = read_config_number(str(folder), "max_position_embeddings")
    file = folder / "tokenizer.json"
    if context is None or len(text.encode()) <= context or not file.is_file():
        return
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # loading the tokenizer raises the error for the user
        return
    tokenizer.no_truncation()
    tokens = len(tokenizer.encode(text.strip(), add_special_tokens=False).ids)
    if tokens > context + TEMPLATE_SLACK:
        raise TooLong(
            f"the prompt has {tokens:,} tokens, the target's context holds {context:,}: shorten the prompt"
        )
