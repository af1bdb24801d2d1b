"""Other tools' names of our options: of transformers, vLLM, SGLang, llama.cpp, lm-eval and FastChat.

A name in `OPTION_SYNONYMS` means the same as our option, so it is taken. A name in `OPTION_ADVICE` means something
similar or several things, so it is refused with what to write instead. An option of the command itself always comes
first: `serve` has a `--max-tokens` of its own.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from treespec.errors import InputError, find_similar_name

Function = TypeVar("Function", bound=Callable[..., Any])

# another tool's name -> ours
OPTION_SYNONYMS = {
    "model": "target",
    "model_path": "target",
    "model_name_or_path": "target",
    "base_model": "target",
    "pretrained": "target",
    "device": "device_map",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "system_prompt": "system",
    "system_message": "system",
    "output": "out",
    "output_dir": "out",
    "output_path": "out",
    "output_file": "out",
    "save_dir": "out",
    "dataset": "data",
    "data_path": "data",
    "train_file": "data",
    "train_data_path": "data",
    "num_samples": "limit",
    "max_samples": "limit",
    "lr": "learning_rate",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_train_steps": "max_steps",
    "warmup_steps": "warm_up",
    "num_warmup_steps": "warm_up",
    "batch": "batch_size",
    "batch_size": "batch",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "draft_vocab_size": "draft_vocab",
    "report_to": "tracker",
    "served_model_name": "name",
    "max_num_seqs": "batch",
    "allowed_origins": "cors",
}
DRAFT_MODEL_ADVICE = "--head HEAD for a draft head, --drafter model:MODEL for a smaller model"
TREE_ADVICE = "--tree chain:N drafts N tokens in a row"
# another tool's name -> what to write instead
OPTION_ADVICE = {
    "draft": DRAFT_MODEL_ADVICE,
    "draft_model": DRAFT_MODEL_ADVICE,
    "draft_model_path": DRAFT_MODEL_ADVICE,
    "speculative_model": DRAFT_MODEL_ADVICE,
    "speculative_config": DRAFT_MODEL_ADVICE,
    "ea_model_path": DRAFT_MODEL_ADVICE,
    "num_speculative_tokens": TREE_ADVICE,
    "speculative_num_steps": TREE_ADVICE,
    "draft_max": TREE_ADVICE,
    "quantization": "--load-in names the form of the weights",
    "load_in_4bit": "--load-in 4bit",
    "load_in_8bit": "--load-in 8bit",
    "chat_template": "--template takes a name of fschat's; the tokenizer's own is the default",
    "do_sample": "--temperature 1 samples, 0 does not",
    "greedy": "--temperature 0",
    "max_model_len": "--max-new-tokens limits an answer",
    "ctx_size": "--max-new-tokens limits an answer",
    "n_gpu_layers": "--device-map auto uses the GPUs",
    "tensor_parallel_size": "--device-map auto spreads the weights over the GPUs",
    "tokenizer": "the tokenizer in the target's folder is used",
    "verbose": "--traceback shows where an error comes from",
}


def find_synonym(name: str, names: Collection[str]) -> str | None:
    """Find the option that another tool's name means; None for one of ours and for an unknown name.

    Args:
        name: as it was written, such as max_tokens or max-tokens.
        names: the options that there are, with underscores.
    """
    plain_name = name.replace("-", "_")
    if plain_name in names:
        return plain_name
    own_name = OPTION_SYNONYMS.get(plain_name)
    if own_name in names:
        return own_name
    return None


def find_suggestion(name: str, names: Collection[str], flag: str = "--") -> str:
    """Say what to write instead of an unknown option: `: did you mean --target?`; "" for a name like no other.

    Args:
        name: as it was written, without dashes before it.
        names: the options that there are, with underscores.
        flag: as `Options.FLAG`. Default: --.
    """
    plain_name = name.replace("-", "_")
    advice = OPTION_ADVICE.get(plain_name)
    if advice is not None:
        return f": {advice}"
    known_names = {name: name for name in names}
    for other_name, own_name in OPTION_SYNONYMS.items():
        if own_name in names:
            known_names.setdefault(other_name, own_name)
    similar_name = find_similar_name(plain_name, known_names)
    if similar_name is None:
        return ""
    own_name = known_names[similar_name]
    if flag:
        own_name = own_name.replace("_", "-")
    return f": did you mean {flag}{own_name}?"


def accept_synonyms(function: Function) -> Function:
    """Let a function take other tools' names of its keywords too.

    A call with a name in `OPTION_ADVICE` raises InputError, with an unknown name TypeError, as in Python.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **rename_keywords(keywords, names))

    return cast(Function, call)


def rename_keywords(keywords: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Replace other tools' names of keywords by ours.

    names: the keywords that there are.

    Raises: InputError for a name in `OPTION_ADVICE`, and for two names of one keyword.
    """
    renamed: dict[str, Any] = {}
    for name, value in keywords.items():
        own_name = find_synonym(name, names)
        if own_name is None and name in OPTION_ADVICE:
            raise InputError(f"no keyword {name}{find_suggestion(name, names, '')}")
        if own_name is None:
            own_name = name  # Python names it in its TypeError
        if own_name in renamed:
            raise InputError(f"{own_name} is given twice, once as {name}: leave out one")
        renamed[own_name] = value
    return renamed
