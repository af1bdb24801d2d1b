"""Export a head to the format of another project, and check that it reads back with equal logits."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from treespec.errors import InputError
from treespec.files.atomic import name_temporary, remove
from treespec.heads.checkpoint import load_head, write_head
from treespec.heads.eagle import FeatureHead
from treespec.heads.folder import GGUF_FILE, check_new
from treespec.heads.formats.fields import WINDOW_FIELDS, drop_names
from treespec.heads.formats.gguf import write_gguf
from treespec.heads.formats.rules import RULES
from treespec.heads.formats.speculators import DEFAULT_DRAFT_TOKENS
from treespec.heads.formats.upstream import Ends, read_as
from treespec.heads.head import Head
from treespec.heads.registry import HEAD_KINDS, check_export

COMPARED_TOKENS = 8  # length of the random sequence on which heads are compared
SERVE_COMMANDS = {  # by format: the command that serves the target with the head, or answers MT-Bench
    "speculators": "vllm serve {folder}",
    "vllm": "vllm serve {target} --speculative-config {drafts}",
    "sglang": "python -m sglang.launch_server --model-path {target} "
    "--speculative-algorithm {algorithm} --speculative-draft-model-path {folder} "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    "tensorrt-llm": "trtllm-serve {target} --config <(echo {captured})",
    "mlx": "python -m mlx_vlm.server --model {target} --draft-model {folder}",
    "gguf": f"llama-server --model TARGET.gguf --model-draft {{folder}}/{GGUF_FILE} --spec-type draft-{{kind}} "
    "--spec-draft-n-max {number}",
    "nemo": "treespec serve --target {target} --head {folder}",  # the engines' commands are not documented
    "eagle": "python -m eagle.evaluation.gen_ea_answer_{prompts} --base-model-path {target} "
    "--ea-model-path {folder}{three}",
}


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        head: the head as it was written.
        logits: the number of logits that were compared, and equal, when the project's rule read it back.
        left_out: a token that the head drafts in treespec but not in the format; None: there is none.
    """

    head: Head
    logits: int
    left_out: int | None = None


def export(
    head_path: str,
    to: str,
    out: Path,
    served: PretrainedConfig,
    embedding: Callable[[], Tensor] | None = None,
    drop_window: bool = False,
) -> Exported:
    """Export a head's directory to the format of another project.

    The files go to a temporary folder first. treespec's reader and the project's rule read them back, the
    logits are compared, and then the folder is renamed to `out`. So a kill leaves no half-written head.

    Args:
        head_path: the head's directory or hub id.
        to: the format, one of `HeadKind.engines`.
        out: the new directory.
        served: the config of the target that an engine runs the head with; the engine loads its
            `name_or_path`.
        embedding: computes the target's embedding [V, H]. It is called if the format must store one and
            the head has none.
        drop_window: leave out the window of an EAGLE head, for formats without one.

    Raises:
        InputError: for a head that the format cannot describe, for an `out` that exists or cannot be
            written, and if the head that is read back differs.
    """
    # 1. Checks that need no conversion.
    head = load_head(head_path)
    text = served.get_text_config()
    kind = HEAD_KINDS[head.kind]
    check_export(head.kind, to, head_path)
    check_new(out)

    # 2. Write next to `out`, read back, compare, rename.
    temporary = name_temporary(out)
    width = text.hidden_size
    try:
        head.check_target(text.num_hidden_layers, text.vocab_size, width, width)
        if drop_window:
            drop_windows(head)
        if len(head.aux_layers) not in (0, 3):
            raise ValueError(f"it reads {len(head.aux_layers)} layers, where the engines take 3")
        must_store = kind.embedded or to == "mlx"
        if must_store and embedding is not None and head.lacks_embedding:
            weight = embedding().detach().to(head.dtype)
            head.share_embedding(nn.Parameter(weight, requires_grad=False))
        left_out = leave_out_mask_token(head, to)
        config, tensors = resolve_name(kind.write)(head, served, to)
        temporary.mkdir(parents=True)
        if to == "gguf":
            write_gguf(temporary, config, tensors)
        else:
            write_head(temporary, config, tensors)  # no checksum: engines may refuse fields
        ends = find_ends(head)
        compare_exported(head, load_head(temporary), ends)
        upstream_head = read_as(to, head.kind, temporary, ends, text.num_hidden_layers)
        compared = compare_exported(head, upstream_head, ends, f" as {to} reads it")
        os.replace(temporary, out)
    except ValueError as error:
        raise InputError(f"{head_path} is not exported to {to}: {error}") from error
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        remove(temporary)
    return Exported(head, compared, left_out)


def drop_windows(head: Head) -> None:
    """Let the layers of an EAGLE head see all positions. Raises ValueError if none has a window."""
    attentions = head.attentions if isinstance(head, FeatureHead) else []
    if not any(attention.window for attention in attentions):
        raise ValueError("it has no window: leave --drop-window out")
    for attention in attentions:
        attention.window = None
    head.config = drop_names(head.config, WINDOW_FIELDS)


def leave_out_mask_token(head: Head, to: str) -> int | None:
    """Restrict a head of all tokens to all but its mask token, for projects that ignore an output layer of all tokens.

    Such a project (speculators, for DFlash) would use the target's output layer instead of the head's.
    Returns the mask token, or None if the head is unchanged.
    """
    if RULES[to, head.kind].output != "own if smaller":
        return None
    if head.lm_head is None or head.vocabulary is not None:
        return None
    token = int(head.config["mask_token_id"])
    drafted = torch.arange(head.vocab_size, device="cpu")
    head.restrict(drafted[drafted != token])
    return token


def build_serve_command(to: str, head: Head, served: PretrainedConfig, out: Path) -> str:
    """Build the shell command that serves the target with an exported head, or answers MT-Bench with it.

    Args:
        to: the format.
        head: the exported head.
        served: the target's config, with its `name_or_path`.
        out: the folder of the export.
    """
    number = DEFAULT_DRAFT_TOKENS
    if head.max_depth:
        number = head.max_depth
    drafts = {"method": head.kind, "model": str(out), "num_speculative_tokens": number}
    captured = {
        "decoding_type": "Eagle3",
        "max_draft_len": number,
        "speculative_model": str(out),
        "eagle3_layers_to_capture": [k - 1 for k in head.aux_layers],
    }
    prompts = "llama3chat"  # the project has a script for Vicuna too
    if served.architectures and "Qwen3ForCausalLM" in served.architectures:
        prompts = "qwen3"
    aux_flag = ""
    if head.aux_layers:
        aux_flag = " --use_eagle3"
    return SERVE_COMMANDS[to].format(
        target=shlex.quote(str(served.name_or_path)),
        folder=shlex.quote(str(out)),
        drafts=shlex.quote(json.dumps(drafts, separators=(",", ":"))),
        captured=shlex.quote(json.dumps({"speculative_config": captured}, separators=(",", ":"))),
        kind=head.kind,
        number=number,
        algorithm=head.kind.upper(),
        three=aux_flag,
        prompts=prompts,
    )


def find_ends(head: Head) -> Ends:
    """Build a target's embedding and output layer for a comparison: random, or the head's embedding."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(
        head.vocab_size, head.hidden_size, generator=generator, dtype=torch.float32, device="cpu"
    )
    output = torch.randn(
        head.vocab_size, head.hidden_size, generator=generator, dtype=torch.float32, device="cpu"
    )
    if isinstance(head.embed_tokens, nn.Embedding):
        embedding = head.embed_tokens.weight.detach().float()
    return Ends(embedding, output)


def compare_exported(
    exported: Head, read_back: Head, ends: Ends | None = None, reading: str = ""
) -> int:
    """Compare the logits of an exported head and the head read back, on the same random sequence.

    Args:
        exported: the head that was exported.
        read_back: the head as it was read from the exported files.
        ends: the target's embedding and output layer, for heads without their own; default:
            `find_ends(exported)`.
        reading: " as … reads it", for the message.

    Returns:
        The number of logits, all of them equal.

    Raises:
        ValueError: if the aux layers, the number of rows or a logit differ.
    """
    if ends is None:
        ends = find_ends(exported)
    if exported.aux_layers != read_back.aux_layers:
        raise ValueError(
            f"read back{reading} it reads layers {read_back.aux_layers}, the head {exported.aux_layers}"
        )
    logits = compute_outputs(exported.float(), ends)
    read_back_logits = compute_outputs(read_back.float(), ends)
    if logits.shape != read_back_logits.shape:
        raise ValueError(
            f"read back{reading} it drafts {len(read_back_logits)} rows, the head {len(logits)}"
        )
    differences = (logits - read_back_logits).abs()
    # A token that is no candidate has the logit -inf in both.
    difference = float(differences.masked_fill(logits == read_back_logits, 0.0).max())
    if difference:
        raise ValueError(f"read back{reading} its logits differ by up to {difference:.3g}")
    return logits.numel()


@torch.no_grad()
def compute_outputs(head: Head, ends: Ends | None = None) -> Tensor:
    """Compute the logits [M, N] of a head in float32 on a random sequence, for all its levels or for two steps.

    ends: the target's embedding and output layer; default: `find_ends(head)`.
    """
    if ends is None:
        ends = find_ends(head)
    generator = torch.Generator().manual_seed(0)
    if head.lacks_embedding:
        head.share_embedding(nn.Parameter(ends.embedding, requires_grad=False))
    features = torch.randn(
        1,
        COMPARED_TOKENS,
        head.feature_size,
        generator=generator,
        dtype=torch.float32,
        device="cpu",
    )
    tokens = torch.randint(
        head.vocab_size, (1, COMPARED_TOKENS + 2), generator=generator, device="cpu"
    )
    counts = torch.ones(1, COMPARED_TOKENS, dtype=torch.bool, device="cpu")
    steps = head.max_depth
    if steps is None:
        steps = 2
    states = head(tokens, features, counts, steps, ends.embed)
    return torch.cat([head.project(rows, step, ends) for step, rows in enumerate(states)])
