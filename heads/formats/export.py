"""Write a head in the format of another project, and compare it with what is read back."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from treespec.errors import InputError
from treespec.heads.checkpoint import load_head, write_head
from treespec.heads.folder import check_new, head_folder
from treespec.heads.formats.engines import DRAFTED, Served
from treespec.heads.head import Head
from treespec.heads.registry import HEADS, check_export

TOKENS = 8  # length of the random sequence on which heads are compared


@dataclass(frozen=True)
class Exported:
    """kind: of the head. compared: logits that were equal when read back. command: serves it."""

    kind: str
    compared: int
    command: str


def export(
    head_path: str,
    to: str,
    out: Path,
    served: Served,
    embedding: Callable[[], Tensor] | None = None,
    norm_output: bool | None = None,
) -> Exported:
    """Write a head's directory in the format of `to`, one of `HeadKind.engines`.

    It writes a temporary folder, reads the head back, and then renames the folder to `out`. So a
    kill leaves no half-written head.
    embedding: computes the target's embedding [V, H], for a head that does not store it where the
    format must.
    norm_output: as for `load_head`.
    Raises InputError for a head that the format cannot describe, for an `out` that exists or cannot
    be written, and where the head that is read back differs.
    """
    # 1. Refuse what needs no conversion to be refused.
    head = load_head(head_path, norm_output=norm_output)
    check_export(head.kind, to, head_path)
    check_new(out)

    # 2. Write next to `out`, read back, compare, rename.
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        head.check_target(served.layers, served.vocab_size, served.hidden_size, served.hidden_size)
        if to != "treespec" and len(head.aux_layers) not in (0, 3):
            raise ValueError(f"it reads {len(head.aux_layers)} layers, where the engines take 3")
        kind = HEADS[head.kind]
        if head.lacks_embedding and kind.embedded and embedding is not None:
            weight = embedding().detach().to(head.dtype)
            head.share_embedding(nn.Parameter(weight, requires_grad=False))
        config, tensors = resolve_name(kind.write)(head, served, to)
        temporary.mkdir(parents=True)
        write_head(temporary, config, tensors)  # no checksum: engines may refuse fields
        compared = compare(head, load_head(temporary))
        os.replace(temporary, out)
    except ValueError as error:
        raise InputError(f"{head_path} is not exported to {to}: {error}") from error
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(head.kind, compared, command(to, head, served, out))


def left_behind(head_path: str) -> str | None:
    """A line about the file of a head's directory that no format can hold; None without it."""
    if not (head_folder(head_path) / "draft_vocab.json").exists():
        return None
    return "draft_vocab.json has no place in the format: the engine drafts all tokens of the head"


def command(to: str, head: Head, served: Served, out: Path) -> str:
    """The shell command that serves the target with the head in `out`, or answers MT-Bench."""
    target, folder = shlex.quote(served.name), shlex.quote(str(out))
    if to == "treespec":
        return f"treespec chat --target {target} --head {folder}"
    if to == "speculators":
        return f"vllm serve {folder}"
    if to == "vllm":
        number = head.max_depth or DRAFTED
        drafts = {"method": head.kind, "model": str(out), "num_speculative_tokens": number}
        speculative = shlex.quote(json.dumps(drafts, separators=(",", ":")))
        return f"vllm serve {target} --speculative-config {speculative}"
    if to == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {head.kind.upper()} --speculative-draft-model-path {folder} "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
    paths = f"--base-model-path {target} --ea-model-path {folder}"
    three = " --use_eagle3" if head.aux_layers else ""
    qwen = "Qwen3ForCausalLM" in served.architectures
    prompts = "qwen3" if qwen else "llama3chat"  # the project has a script for Vicuna too
    return f"python -m eagle.evaluation.gen_ea_answer_{prompts} {paths}{three}"


def compare(one: Head, other: Head) -> int:
    """The number of logits of two heads on the same random sequence, all of them equal.

    Raises ValueError where one differs.
    """
    if one.aux_layers != other.aux_layers:
        raise ValueError(f"read back it reads layers {other.aux_layers}, the head {one.aux_layers}")
    computed = [outputs(head.float()) for head in (one, other)]
    if difference := float((computed[0] - computed[1]).abs().max()):
        raise ValueError(f"read back its logits differ by up to {difference:.3g}")
    return computed[0].numel()


@torch.no_grad()
def outputs(head: Head) -> Tensor:
    """[steps, TOKENS, N] logits of a head in float32 on a random sequence; of EAGLE-1 the features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, TOKENS, head.feature_size, generator=generator)
    return head.trial(features, generator)
