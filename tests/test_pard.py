"""PARD: a language model whose levels are its logits at mask tokens behind the text."""

import pytest
import torch
from commands import complains
from models import as_undrafted, close, seeded, target
from training import change_json, save_model

from treespec.api.spec import Spec
from treespec.draft.drafter import Frontier
from treespec.draft.models.pard import PardProposer, load_pard
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target

MASK = 61
LEVELS = 4


def draft_plainly(model, text, levels=LEVELS):
    """[K, V] the logits of one plain call over the text and K - 1 mask tokens, at its last K places."""
    tokens = torch.cat([text, torch.full((levels - 1,), MASK)])
    return model.model(tokens[None]).logits[0, -levels:]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_levels_are_the_models_logits_at_masks_behind_the_text(name):
    """Two sequences over three cycles and a rewind; gemma2 has windows, which the texts are longer than."""
    model = target(name)
    texts = [torch.randint(3, 60, (n,), generator=seeded(n)) for n in (40, 9)]
    proposer = PardProposer(model, target("llama"), MASK, LEVELS)
    proposer.join([proposer.new()])
    observed = [0, 0]
    nodes = Frontier(torch.tensor([5, 9]), torch.tensor([0, 0]))
    for ends in ((3, 5), (7, 8), (40, 9)):
        if ends[0] == 40:
            observed = [4, 5]
            proposer.rewind(observed)
        new = [text[n:end] for text, n, end in zip(texts, observed, ends, strict=True)]
        proposer.observe([torch.empty(len(tokens) - 1, 0) for tokens in new], new)
        observed = [end - 1 for end in ends]
        first = proposer.begin(torch.stack([tokens[-1] for tokens in new]))
        deeper = [proposer.extend([nodes, nodes]) for _ in range(LEVELS - 1)]
        for row, end in enumerate(ends):
            wanted = draft_plainly(model, texts[row][:end])
            close(proposer.compute_all_levels(row), wanted, 1e-4)
            close(first[row][0], wanted[0], 1e-4)
            for level, logits in zip(wanted[1:], deeper, strict=True):
                close(logits[row], level.expand(2, -1), 1e-4)


def test_a_model_drafts_chains_and_trees_of_its_levels(tmp_path):
    folder = save_model(tmp_path / "model", pard_token=3)
    spec = Spec(Target.load(str(folder), dtype="float32"), None)
    drafter = load_pard(DrafterSpec.parse(f"pard:{folder},tokens=3"), spec.target)
    for tree in ("ddtree:nodes=9", "chain:3", "2x3"):
        as_undrafted(Spec(spec.target, drafter, tree, "topk"), ["the user asks", "the answer"], 12)
    with complains("the tree is 4 deep, the head drafts 3 tokens"):
        Spec(spec.target, drafter, "chain:4", "topk")


def test_a_model_without_a_mask_token_is_refused(tmp_path):
    folder = save_model(tmp_path / "model")
    spec = DrafterSpec.parse(f"pard:{folder}")
    model = Target.load(str(folder))
    with complains("is no PARD model: its config.json has no pard_token"):
        load_pard(spec, model)
    change_json(folder, pard_token=9999)
    with complains("pard_token is 9999 in config.json, must be a token below"):
        load_pard(spec, model)
