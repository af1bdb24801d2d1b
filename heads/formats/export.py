"""A head in the format of another project, read back and compared before it is there."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads import checksum
from treespec.heads.checkpoint import HeadError, head_folder, load_head
from treespec.heads.eagle3 import default_taps
from treespec.heads.formats import eagle, eagle3, medusa, speculators
from treespec.heads.formats.engines import Served

Writer = Callable[[Any, Served], tuple[dict[str, Any], dict[str, Tensor]]]

# (head, target) -> config.json and tensors, by where they go and the kind of head; ValueError for what has no place
WRITERS: dict[str, dict[str, Writer]] = {
    "sglang": {"eagle": eagle.to_sglang, "eagle3": eagle3.to_sglang},
    "vllm": {"eagle": eagle.to_vllm, "eagle3": eagle3.to_vllm, "medusa": medusa.to_vllm},
    "speculators": {"eagle3": speculators.write},
    "eagle": {"eagle": eagle.to_eagle, "eagle3": eagle3.to_eagle},
}
BIASED = {("eagle", "eagle"), ("vllm", "eagle")}  # where the queries, keys and values of a head may have biases
ROTARY = ("default", "linear", "dynamic")  # of SafeAILab/EAGLE
TOKENS = 8  # of the text that heads are compared on


@dataclass(frozen=True)
class Exported:
    """kind: of the head. compared: numbers that it and the directory's head gave alike. command: what serves it."""

    kind: str
    compared: int
    command: str


def export(head_path: str, to: str, out: Path, served: Served) -> Exported:
    """Write a head's directory in the format of `to`, one of WRITERS.

    All is written in a folder beside `out` and read back before that is renamed, so that a kill leaves nothing half.
    Raises HeadError for a head that has no place in the format, for an `out` that is there or cannot be written, and
    where the directory's head differs.
    """
    head = load_head(head_path)
    writers = WRITERS.get(to)
    if writers is None:
        raise HeadError(f"--to is {to!r}, must be one of {', '.join(WRITERS)}")
    if head.kind not in writers:
        raise HeadError(f"{to} takes heads of kind {' or '.join(writers)}: {head_path} is of kind {head.kind}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadError(f"{out} exists already: name a new folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        _check(head, to, served)
        config, tensors = writers[head.kind](head, served)
        temporary.mkdir(parents=True)
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        about = {"format": "pt"}
        about[checksum.FIELD] = checksum.of_tensors(tensors, about)  # config.json has none: engines may refuse fields
        save_file(tensors, temporary / "model.safetensors", about)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        compared = compare(head, load_head(temporary))
        os.replace(temporary, out)
    except ValueError as error:
        raise HeadError(f"{head_path} is not exported to {to}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise HeadError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(head.kind, compared, command(to, head, served, out))


def left_behind(head_path: str) -> str | None:
    """What of a head's directory no format has a place for, in a line."""
    if not (head_folder(head_path) / "draft_vocab.json").exists():
        return None
    return "draft_vocab.json has no place in the format: the engine drafts all tokens of the head"


def command(to: str, head: Any, served: Served, out: Path) -> str:
    """The line of the shell that serves the target with a head of that folder, or answers MT-Bench with both."""
    target, folder = shlex.quote(served.name), shlex.quote(str(out))
    if to == "speculators":
        return f"vllm serve {folder}"
    if to == "vllm":
        number = head.max_depth or speculators.DRAFTED
        drafts = {"method": head.kind, "model": str(out), "num_speculative_tokens": number}
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(drafts, separators=(',', ':')))}"
    if to == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {head.kind.upper()} "
            f"--speculative-draft-model-path {folder} --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4"
        )
    paths = f"--base-model-path {target} --ea-model-path {folder}"
    three = " --use_eagle3" if head.kind == "eagle3" else ""
    prompts = "qwen3" if "Qwen3ForCausalLM" in served.architectures else "llama3chat"  # Vicuna has a script too
    return f"python -m eagle.evaluation.gen_ea_answer_{prompts} {paths}{three}"


def compare(one: Any, other: Any) -> int:
    """How many numbers two heads gave alike on the same random text. Raises ValueError where one differs."""
    if one.taps != other.taps:
        raise ValueError(f"read back it taps {other.taps}, the head {one.taps}")
    given = [outputs(head.float()) for head in (one, other)]
    if difference := float((given[0] - given[1]).abs().max()):
        raise ValueError(f"read back its logits differ by up to {difference:.3g}")
    return given[0].numel()


@torch.no_grad()
def outputs(head: Any) -> Tensor:
    """[steps, TOKENS, N] logits of a head in float32 on random tokens and features, by step or depth.

    Of EAGLE-1, whose output layer is the target's, the features. EAGLE's second step is on the head's own features.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, TOKENS, head.feature_size, generator=generator)
    if head.kind == "medusa":
        return torch.cat(head(features))
    tokens = torch.randint(head.vocab_size, (1, TOKENS + 1), generator=generator)
    if head.embed_tokens is None:
        weight = torch.randn(head.vocab_size, head.hidden_size, generator=generator)
        head.embed_tokens = nn.Embedding.from_pretrained(weight)
    hidden, steps = head.fuse(features), []
    for step in range(2):
        places = 97 * torch.arange(step, step + TOKENS)  # far apart, so that angles differ where their scaling does
        hidden = head.step(tokens[:, step : step + TOKENS], hidden, places)
        steps.append(hidden if head.kind == "eagle" else head.logits(hidden))
    return torch.cat(steps)


def _check(head: Any, to: str, served: Served) -> None:
    """Raises ValueError for a head of another target, and for what no head of that engine has."""
    if head.vocab_size != served.vocab_size:
        raise ValueError(f"it is for a vocabulary of {head.vocab_size}, the target's is {served.vocab_size}")
    if head.kind == "eagle3":
        head.taps = head.taps or default_taps(served.layers)
        if beyond := [k for k in head.taps if not 0 <= k < served.layers]:
            raise ValueError(f"it taps layer {beyond[0]}, the target has {served.layers}")
        if len(head.taps) != 3:
            raise ValueError(f"it taps {len(head.taps)} layers, where the engines take 3")
    width = (len(head.taps) or 1) * served.hidden_size
    if head.feature_size != width:
        raise ValueError(f"it is for features of width {head.feature_size}, the target's are {width}")
    if head.kind == "medusa":
        return
    llama = LlamaConfig(**head.config)
    if head.embed_scale != 1.0:
        raise ValueError(f"its target's embeddings are scaled by {head.embed_scale:g}, for which there is no field")
    if head.config.get("qkv_bias") and (to, head.kind) not in BIASED:
        raise ValueError("its queries, keys and values have biases, for which there is no field")
    if getattr(head, "midlayer", None) and head.midlayer.norm_before_residual and to in ("sglang", "eagle"):
        raise ValueError("its residual is normed (norm_before_residual), which only vllm and speculators know")
    if to != "eagle" and llama.hidden_act != "silu":
        raise ValueError(f"its activation is {llama.hidden_act}, where the engines have silu")
    if to == "eagle":
        if (rope := (llama.rope_parameters or {}).get("rope_type")) not in ROTARY:
            raise ValueError(f"its rotary positions are of type {rope!r}, which is none of {', '.join(ROTARY)}")
        if (width := (llama.head_dim or 0) * llama.num_attention_heads) != llama.hidden_size:
            raise ValueError(f"its attention heads are {width} wide together, not {llama.hidden_size} as there")
