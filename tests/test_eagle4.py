"""EAGLE-4: what its documentation says, as plain functions, and the files of NeMo AutoModel."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from commands import complains
from drafters import DRAFT_PATHS, EIGHT_LAYERS, draft_paths
from head_files import LAYER_IDS_KEY, rename_midlayer, write_head
from models import close, ones, randn, same_weights
from torch.nn.functional import silu
from training import change_json

from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.host_step import find_head_step
from treespec.draft.heads.loading import build_new_head
from treespec.draft.vocabulary import restrict
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.cpu.packing import pack
from treespec.model.target import Target

WINDOW = 4
CANDIDATES = 5
TEXT = torch.tensor([7, 3, 9, 12, 5, 40, 8, 21, 33])


def random_eagle4(window=WINDOW, target=EIGHT_LAYERS):
    """A head with random weights, norms too."""
    torch.manual_seed(0)
    sizes = {"rank": 6, "num_candidates": CANDIDATES}
    head = build_new_head("eagle4", target, candidate_head=sizes, sliding_window=window).eval()
    for name, parameter in head.named_parameters():
        if name != "embed_tokens.weight":  # the target's
            parameter.data += 0.3 * torch.randn_like(parameter)
    return head


def write_config(head):
    """As `export_eagle4` writes it: sizes, norms, rotary positions, the window, layer ids and the candidate head."""
    llama = head.llama
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {name: getattr(llama, name) for name in (*sizes, "max_position_embeddings", "rms_norm_eps")} | {
        "architectures": ["LlamaForCausalLMEagle4"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "fc_norm": True,
        "norm_output": True,
        "sliding_window": WINDOW,
        LAYER_IDS_KEY: [2, 4, 5],
        "candidate_head": {"rank": 6, "num_candidates": CANDIDATES},
    }


def write_nemo(folder, **changes):
    head = random_eagle4()
    tensors = rename_midlayer(head.state_dict())
    return write_head(folder, write_config(head) | changes, tensors), tensors


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate_by_position(x):
    """[T, heads, D], the pairs (i, i + D/2) turned by position / 10000^(2i/D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half, dtype=torch.float32) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def compute_state(tensors, config, tokens, hidden):
    """[H] the state after a text: EAGLE-3's layer over the last WINDOW positions, normed as in 3.1."""

    def weight(name):
        return tensors[f"layers.0.{name}.weight"]

    read = [norm(tensors["embed_tokens.weight"][tokens], weight("input_layernorm"))]
    attended = torch.cat([*read, norm(hidden, weight("hidden_norm"))], -1)
    size = config["head_dim"]
    q, k, v = ((attended @ weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, size)) for name in "qkv")
    groups = q.shape[1] // k.shape[1]
    q, k = rotate_by_position(q), rotate_by_position(k).repeat_interleave(groups, 1)
    scores = torch.einsum("hd,thd->ht", q[-1], k) / size**0.5
    shares = scores[:, -WINDOW:].softmax(-1)
    out = torch.einsum("ht,thd->hd", shares, v.repeat_interleave(groups, 1)[-WINDOW:]).flatten()
    state = hidden[-1] + weight("self_attn.o_proj") @ out
    normed = norm(state, weight("post_attention_layernorm"))
    gate, up, down = (weight(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
    return norm(state + down @ (silu(gate @ normed) * (up @ normed)), tensors["norm.weight"])


def compute_logits(tensors, config, text, features, path):
    """[V] the logits after a path below a text: full rows of the low-rank head's first tokens, and -inf elsewhere."""
    chunks = [norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(features.chunk(3, -1))]
    hidden = torch.cat(chunks, -1) @ tensors["fc.weight"].T
    tokens = text[1:]
    for token in (*path, None):
        state = compute_state(tensors, config, tokens, hidden)
        hidden = torch.cat([hidden, state[None]])
        tokens = torch.cat([tokens, torch.tensor([token or 0])])
    low_rank = tensors["efficient_lm_head.weight"] @ tensors["efficient_lm_head_down_proj.weight"]
    logits = torch.full((config["vocab_size"],), -torch.inf, dtype=torch.float32)
    for token in (low_rank @ state).sort(descending=True).indices[: config["candidate_head"]["num_candidates"]]:
        logits[token] = tensors["lm_head.weight"][token] @ state
    return logits


@torch.no_grad()
def test_a_loaded_head_drafts_what_its_documentation_says(tmp_path):
    """Two levels of a tree below a text longer than the window: the candidates, and their logits to 1e-4."""
    folder, tensors = write_nemo(tmp_path / "head")
    head = load_head(folder)
    assert head.kind == "eagle4"
    features = EIGHT_LAYERS.compute_features(TEXT[None], head.aux_layers)[0, :-1]
    found = draft_paths(EagleProposer(head, EIGHT_LAYERS), EIGHT_LAYERS, TEXT[1:], features)
    compute = partial(compute_logits, tensors, write_config(head), TEXT, features)
    wanted = torch.stack([compute(path) for path in DRAFT_PATHS])
    assert (wanted.isfinite().sum(-1) == CANDIDATES).all()
    close(found, wanted, 1e-4)


def test_many_states_at_once_have_the_logits_of_each_alone():
    head = random_eagle4()
    states = randn(40, 32)
    close(head.project(states), torch.stack([head.project(state) for state in states]), 1e-5)


def test_a_saved_head_is_read_back_with_its_draft_vocabulary(tmp_path):
    head = load_head(write_nemo(tmp_path / "head")[0])
    save_head(head, tmp_path / "saved")
    again = load_head(tmp_path / "saved")
    assert same_weights(again.state_dict(), head.state_dict())
    assert again.config | {"checksum": 0} == head.config | {"checksum": 0}
    kept = torch.arange(1, 64, 2)
    states = randn(3, 32)
    estimates = head.efficient_lm_head(head.efficient_lm_head_down_proj(states))
    restrict(head, EIGHT_LAYERS, kept)
    best = estimates[:, kept].topk(CANDIDATES).indices.sort().values
    assert torch.equal(head.project(states).isfinite().nonzero()[:, 1].view(3, -1), best)
    save_head(head, tmp_path / "few")
    assert torch.equal(load_head(tmp_path / "few").project(states), head.project(states))


def test_rows_of_the_low_rank_head_follow_the_order_of_d2t(tmp_path):
    folder, tensors = write_nemo(tmp_path / "head")
    order = torch.randperm(64)
    shuffled = {name: tensors[name][order] for name in ("lm_head.weight", "efficient_lm_head.weight")}
    mapping = {"d2t": order - torch.arange(64)}
    other = write_head(tmp_path / "other", write_config(load_head(folder)), tensors | shuffled | mapping)
    assert same_weights(load_head(other).state_dict(), load_head(folder).state_dict())


REFUSED = {
    "candidate_head": ({"rank": 6}, r"candidate_head\.num_candidates is missing"),
    "num_candidates": (7, r"num_candidates is \[5, 7\]"),
    "norm_output": (None, "norm_output is missing"),
    "use_sliding_window": (False, "sliding_window is 4, and use_sliding_window is false"),
    "novel_part": (1, "novel_part is 1: treespec does not know this field"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_file_that_does_not_say_all_is_refused_by_name(field, tmp_path):
    value, complaint = REFUSED[field]
    folder, _ = write_nemo(tmp_path / "head", **{field: value})
    with complains(complaint):
        load_head(folder)


def test_a_low_rank_head_of_other_sizes_is_refused(tmp_path):
    folder, tensors = write_nemo(tmp_path / "head")
    change_json(folder, candidate_head={"rank": 7, "num_candidates": 5})
    with complains("candidate_head.rank is 7, and efficient_lm_head_down_proj.weight has 6 rows"):
        load_head(folder)
    config = write_config(random_eagle4())
    for changed, complaint in (
        (
            {"efficient_lm_head.weight": ones(63, 6)},
            "efficient_lm_head.weight has 63 rows, and lm_head.weight 64",
        ),
        ({"efficient_lm_head_down_proj.weight": ones(6, 31)}, r"efficient_lm_head_down_proj.weight is \[6, 31\]"),
    ):
        with complains(complaint):
            load_head(write_head(tmp_path / "other", config, tensors | changed))
    del tensors["lm_head.weight"]
    with complains("it lacks lm_head.weight"):
        load_head(write_head(tmp_path / "other", config, tensors))


def test_a_step_with_candidates_is_no_c_call():
    """Not without its window either."""
    target = Target(deepcopy(EIGHT_LAYERS.model).to(torch.bfloat16))  # the head's embedding is the target's
    for window in (WINDOW, None):
        head = random_eagle4(window or WINDOW, target).to(torch.bfloat16)
        head.midlayer.self_attn.window = window
        pack(head)
        assert find_head_step(head, target) is None
        assert head.project(randn(2, 32).bfloat16()).isfinite().sum() == 2 * CANDIDATES
