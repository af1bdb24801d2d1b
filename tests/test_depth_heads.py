"""Medusa's and Hydra's heads: their files, what they draft from, and that the text stays the target's."""

import pytest
import torch
from commands import complains
from drafters import DEPTH_HEADS, DRAFT_PATHS, build_head, draft_paths, extrapolate, source_of
from models import as_undrafted, close, follow, prompt, randn, random_head, random_model, same_weights, seeded, target

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.heads.hydra import HydraProposer
from treespec.draft.heads.loading import attach_to_target, build_new_head, build_proposer, roll_out_drafts
from treespec.draft.vocabulary import restrict
from treespec.eval.acceptance.sources import gather_step_logits
from treespec.eval.texts import Passage
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target


def head_of(model, kind):
    return random_head(model) if kind == "eagle" else build_head(model, kind)


PUBLISHED = {  # names and shapes of 2 heads with one block each; Hydra++ counts a dropout before each module
    "medusa": """
0.0.linear.bias=32 0.0.linear.weight=32x32 0.1.weight=64x32 1.0.linear.bias=32 1.0.linear.weight=32x32
1.1.weight=64x32
""",
    "hydra": """
hydra_lm_head.0.bias=64 hydra_lm_head.0.weight=64x32 hydra_lm_head.1.bias=64 hydra_lm_head.1.weight=64x32
hydra_mlp.0.0.linear.bias=32 hydra_mlp.0.0.linear.weight=32x64 hydra_mlp.0.0.res_connection.bias=32
hydra_mlp.0.0.res_connection.weight=32x64 hydra_mlp.1.0.linear.bias=32 hydra_mlp.1.0.linear.weight=32x96
hydra_mlp.1.0.res_connection.bias=32 hydra_mlp.1.0.res_connection.weight=32x96
""",
    "hydra++": """
hydra_lm_head.0.1.bias=64 hydra_lm_head.0.1.weight=64x32 hydra_lm_head.1.1.bias=64 hydra_lm_head.1.1.weight=64x32
hydra_mlp.0.1.linear.bias=32 hydra_mlp.0.1.linear.weight=32x64 hydra_mlp.0.1.res_connection.bias=32
hydra_mlp.0.1.res_connection.weight=32x64 hydra_mlp.0.3.linear.bias=32 hydra_mlp.0.3.linear.weight=32x32
hydra_mlp.0.5.linear.bias=32 hydra_mlp.0.5.linear.weight=32x32 hydra_mlp.0.7.linear.bias=32
hydra_mlp.0.7.linear.weight=32x32 hydra_mlp.1.1.linear.bias=32 hydra_mlp.1.1.linear.weight=32x96
hydra_mlp.1.1.res_connection.bias=32 hydra_mlp.1.1.res_connection.weight=32x96 hydra_mlp.1.3.linear.bias=32
hydra_mlp.1.3.linear.weight=32x32 hydra_mlp.1.5.linear.bias=32 hydra_mlp.1.5.linear.weight=32x32
hydra_mlp.1.7.linear.bias=32 hydra_mlp.1.7.linear.weight=32x32
prefix_embeding_layer.layers.0.input_layernorm.weight=32 prefix_embeding_layer.layers.0.mlp.down_proj.weight=32x48
prefix_embeding_layer.layers.0.mlp.gate_proj.weight=48x32 prefix_embeding_layer.layers.0.mlp.up_proj.weight=48x32
prefix_embeding_layer.layers.0.post_attention_layernorm.weight=32
prefix_embeding_layer.layers.0.self_attn.k_proj.weight=16x32
prefix_embeding_layer.layers.0.self_attn.o_proj.weight=32x32
prefix_embeding_layer.layers.0.self_attn.q_proj.weight=32x32
prefix_embeding_layer.layers.0.self_attn.v_proj.weight=16x32 prefix_embeding_layer.norm.weight=32
""",
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_names_and_shapes_are_the_published_ones(kind):
    """As in `medusa_lm_head.safetensors` and `hydra_lm_head.pt`."""
    found = build_head(target("llama"), kind, 2).state_dict().items()
    assert {f"{name}={'x'.join(map(str, value.shape))}" for name, value in found} == {*PUBLISHED[kind].split()}


@pytest.mark.parametrize("kind", DEPTH_HEADS)
def test_heads_survive_their_file_and_are_known_by_their_kind(kind, tmp_path):
    model = target("llama")
    head = build_head(model, kind)
    save_head(head, tmp_path)
    loaded = source_of(f"{kind}:{tmp_path}", model).head
    assert loaded.kind == kind
    assert same_weights(head.state_dict(), loaded.state_dict())
    save_head(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    with complains(f"write {kind.replace('+', '.')}:"):
        source_of(f"eagle:{tmp_path}", model)


@pytest.mark.parametrize("kind", ["eagle", *DEPTH_HEADS])
def test_heads_of_another_width_or_vocabulary_are_refused(kind):
    head = head_of(target("llama"), kind)
    for name in ("feature_size", "vocab_size"):
        setattr(head, name, getattr(head, name) + 1)
        with complains("the target's"):
            attach_to_target(head, target("llama"), "h")


def test_new_heads_draft_by_the_targets_output_embedding():
    model = target("llama")
    tokens = torch.randint(3, 64, (9,), generator=seeded(5))
    features = model.compute_features(tokens[None])[0]
    for kind in ("medusa", "hydra"):  # Hydra's first block adds SiLU of a random bias, as Medusa's does
        head = build_new_head(kind, model, heads=2)
        for name, value in head.named_parameters():
            if name.endswith("linear.bias"):
                value.data.zero_()
        for logits in roll_out_drafts(head, model, tokens, features, 2):
            close(logits, model.compute_output_logits(features[: len(logits)]), 1e-5)


@pytest.mark.parametrize("kind", ["eagle", *DEPTH_HEADS])
def test_tree_drafting_equals_each_path_alone(kind):
    """EAGLE's feature extrapolated along a path; else head i of the state and of the i + 1 tokens below it."""
    model = target("gemma3")
    head = head_of(model, kind)
    text = torch.randint(3, 64, (7,))
    features = randn(7, 32)
    state = head.prepare_states(features[None], torch.arange(7))[0, -1] if kind == "hydra++" else features[-1]

    def alone(tokens):
        if kind == "eagle":
            return model.compute_output_logits(extrapolate(head, text, features, tokens))[0]
        if kind == "medusa":
            return head.compute_step_logits(len(tokens), features[-1])
        embedded = model.model.get_input_embeddings()(torch.tensor([int(text[-1]), *tokens]))  # Gemma scales its own
        return head.compute_step_logits(len(tokens), torch.cat([state, *embedded]))

    logits = draft_paths(build_proposer(head, model), model, text, features)
    close(logits, torch.stack([alone(path) for path in DRAFT_PATHS]), 1e-4)


def test_a_prefix_in_pieces_equals_the_prefix_at_once(monkeypatch):
    """A prompt in chunks of 8, then pairs and single states, against one causal pass of the prefix layer."""
    model = target("llama")
    head = build_head(model, "hydra++")
    root = torch.tensor([9])
    features = randn(60, 32)
    monkeypatch.setattr(model, "choose_chunk_beside", lambda columns: 8)
    proposer = HydraProposer(head, model)
    end = 0
    for size in (45, 2, 1, 12):
        follow(proposer, features[end : end + size], torch.zeros(size, dtype=torch.int64))
        end += size
        (logits,) = proposer.begin(root, model.build_cache())
        state = head.prepare_states(features[None, :end], torch.arange(end))[0, -1]
        close(logits[0], head.compute_step_logits(0, torch.cat([state, model.embed_tokens(root)[0]])), 1e-4)


@pytest.mark.parametrize("kind", ["eagle", *DEPTH_HEADS])
@pytest.mark.parametrize("length", [0, 2, 5, 6, 9])
def test_rewinding_equals_never_having_seen_the_rest(kind, length):
    model = target("llama")
    head = head_of(model, kind)
    root = torch.tensor([7])
    text = torch.randint(3, 64, (9,))
    features = randn(9, 32)
    used, fresh = (build_proposer(head, model) for _ in range(2))
    follow(used, features[:5], text[:5])
    used.begin(root, model.build_cache())
    used.extend([Frontier(torch.tensor([3, 4]), torch.tensor([0, 0]))])
    follow(used, features[5:], text[5:])
    used.rewind([length])
    if length:
        follow(fresh, features[:length], text[:length])
    if length in (0, 2, 5) and kind != "eagle":  # its state is gone, and nothing is drafted before there is another
        assert used.begin(root, model.build_cache()) == [None]
    for proposer in (used, fresh):
        follow(proposer, features[:3], text[:3])
    close(*(one.begin(root, model.build_cache())[0] for one in (used, fresh)), 1e-4)


@pytest.mark.parametrize("kind", DEPTH_HEADS)
def test_a_tree_deeper_than_the_heads_is_refused(kind):
    model = target("llama")
    head = build_head(model, kind, 3)
    with complains("the tree is 5 deep, the head drafts 3 tokens: take --tree chain:3"):
        Spec(model, head, "eagle")
    with complains("take --tree dynamic:depth=3"):
        Spec(model, head, "dynamic")
    for verifier in ("topk", "rrs", "single", "is-lp", "spechub"):
        assert Spec(model, head, verifier=verifier).policy.max_depth == 3


def test_a_draft_step_beyond_the_heads_is_refused_by_the_acceptance_lab():
    spec = Spec(target("llama"), build_head(target("llama"), "hydra", 2))
    text = Passage(torch.arange(3, 30), torch.ones(27, dtype=torch.bool), 0)
    assert len(gather_step_logits(spec, [text], 2).p) == len(gather_step_logits(spec, [text], 2).q) > 0
    with complains("--step is 3: 2 is the most with"):
        gather_step_logits(spec, [text], 3)


@pytest.mark.parametrize("kind", DEPTH_HEADS)
def test_a_draft_vocabulary_is_all_that_the_heads_draft(kind):
    model = Target(random_model(target("llama").model.config))
    head = build_head(model, kind)
    text = torch.tensor(prompt(40))
    vocabulary = torch.arange(1, 64, 2)
    features = model.compute_features(text[None])[0]
    whole = list(roll_out_drafts(head, model, text, features, 3))
    restrict(head, model, vocabulary)
    for all_of_them, logits in zip(whole, roll_out_drafts(head, model, text, features, 3), strict=True):
        close(logits[:, vocabulary], all_of_them[:, vocabulary], 1e-5)
        assert logits[:, ::2].isneginf().all()
    as_undrafted(Spec(model, head, "2x3"), [prompt(), prompt(40), prompt(1)], 16)
