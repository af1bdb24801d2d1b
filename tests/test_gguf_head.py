"""A head's GGUF file: llama.cpp's own arithmetic on its tensors gives the head's logits."""

import pytest
import torch
from commands import complains
from drafters import build_eagle3
from gguf import GGUFReader
from head_files import SERVED_CONFIG, save_with
from models import ones, randn
from torch.nn.functional import rms_norm, silu

from treespec.heads.checkpoint import load_head
from treespec.heads.formats.export import export
from treespec.heads.formats.gguf import permute_rotary_rows

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def as_llama_cpp(file, ids, aux):
    """Logits [T, N] of the first draft step, and d2t, in the order of llama.cpp's graph. ids: [T]. aux: [T, 3 H]."""
    reader = GGUFReader(file)
    w = {one.name: torch.from_numpy(one.data.copy()) for one in reader.tensors}

    def number(key):
        field = reader.fields[f"eagle3.{key}"]
        return field.parts[field.data[0]][0].item()

    # 1. What the layer sees.
    eps, heads, width = (number(f"attention.{key}") for key in ("layer_norm_rms_epsilon", "head_count", "key_length"))

    def norm(x, name):
        return rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)

    g = aux @ w["fc.weight"].T
    both = torch.cat([norm(w["token_embd.weight"][ids], "blk.0.attn_norm"), norm(g, "blk.0.attn_norm_2")], 1)

    # 2. Neighbours are rotated; keys serve several heads.
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    places = torch.arange(len(ids))[:, None, None] * number("rope.freq_base") ** -powers
    turns = torch.polar(ones(1), places / w.get("rope_freqs.weight", ones(1)))

    def rotated(name):
        rows = torch.view_as_complex((both @ w[name].T).view(len(ids), -1, width // 2, 2))
        return torch.view_as_real(rows * turns).flatten(2)

    q = rotated("blk.0.attn_q.weight")
    k = rotated("blk.0.attn_k.weight")
    v = (both @ w["blk.0.attn_v.weight"].T).view(len(ids), -1, width)
    k, v = (x.repeat_interleave(heads // number("attention.head_count_kv"), 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / width**0.5
    scores += torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float32).triu(1)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)

    # 3. The rest of the layer, and the output.
    hidden = out @ w["blk.0.attn_output.weight"].T + (
        norm(g, "blk.0.attn_norm_2") if number("norm_before_residual") else g
    )
    inner = norm(hidden, "blk.0.ffn_norm")
    inner = silu(inner @ w["blk.0.ffn_gate.weight"].T) * (inner @ w["blk.0.ffn_up.weight"].T)
    hidden = hidden + inner @ w["blk.0.ffn_down.weight"].T
    return norm(hidden, "output_norm") @ w["output.weight"].T, w["d2t"]


@torch.no_grad()
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3])
@pytest.mark.parametrize("before", [False, True])
def test_llama_cpps_arithmetic_gives_the_heads_logits(rope, before, tmp_path):
    head = build_eagle3()
    folder = save_with(
        head, tmp_path / "head", rope_parameters=rope, rope_theta=rope["rope_theta"], norm_before_residual=before
    )
    export(folder, "gguf", tmp_path / "out", SERVED_CONFIG)
    head = load_head(folder)
    ids = torch.randint(64, (9,))
    aux = randn(9, head.feature_size)
    hidden = head.forward_step(ids[None], head.fuse(aux)[None], torch.arange(9))[0]
    found, d2t = as_llama_cpp(tmp_path / "out" / "model.gguf", ids, aux)
    assert torch.equal(d2t, head.d2t + torch.arange(len(d2t)))
    torch.testing.assert_close(found, head.lm_head(head.normalize_hidden(hidden)), atol=2e-5, rtol=1e-4)


def test_rows_turn_as_drawn_and_back():
    rows = torch.arange(12.0)[:, None]
    assert permute_rotary_rows(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(permute_rotary_rows(permute_rotary_rows(rows, 2), 2, back=True), rows)


def test_a_damaged_file_is_refused_in_a_line(tmp_path):
    export(save_with(build_eagle3(), tmp_path / "head"), "gguf", tmp_path / "out", SERVED_CONFIG)
    file = tmp_path / "out" / "model.gguf"
    file.write_bytes(file.read_bytes()[:-4000])
    with complains("model.gguf is damaged: .*; fetch or train the head again"):
        load_head(tmp_path / "out")
