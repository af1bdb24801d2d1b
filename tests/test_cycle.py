"""The cycle that docs/architecture.md draws, computed by the loop's own functions."""

import torch
from models import VOCAB, seeded, target

from treespec.api.spec import Spec
from treespec.draft.heads.loading import build_new_head
from treespec.engine.cycle import commit, draft, emit, forward_trees, observe, select_features, verify
from treespec.engine.request import Request
from treespec.engine.stats import Stats
from treespec.model.masks import build_additive_masks, pad_trees
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Sampler
from treespec.text.ending import Ending
from treespec.trees.mask import build_ancestor_mask, compute_positions
from treespec.verify.walk import Verdict

CPU = torch.device("cpu")
PARENTS = torch.tensor([-1, 0, 0, 1, 2])


def request_of(tokens, temperature=0.0):
    sampler = Sampler(SamplingParams(temperature))
    return Request([*range(3, 3 + tokens)], Ending(None, frozenset(), (), 9), seeded(0), Stats(), sampler)


def test_a_cycle_of_two_sequences_has_the_shapes_of_the_architecture_page():
    """Its figure: roots [2], trees of five nodes, logits [5, V], and the committed columns."""
    model = target("llama")
    head = build_new_head("eagle", model).eval()
    requests = [request_of(4, temperature=1.0), request_of(2, temperature=1.0)]
    with torch.inference_mode():
        spec = Spec(model, head, "levels:2x1", "rrs")
        batch = spec.decoder.batch
        batch.admit_and_release(requests)
        drafted = draft(batch)

        # 1. The trees, and their columns.
        for tree, request in zip(drafted.trees, requests, strict=True):
            assert tree.parents.tolist() == PARENTS.tolist()
            assert int(tree.tokens[0]) == request.root
            assert torch.equal(tree.ancestors, build_ancestor_mask(PARENTS))
            assert tree.drafts.nodes.tolist() == [0, 1, 2]
            assert (tree.drafts.q.shape, tree.drafts.draws.tokens.shape) == ((3, VOCAB), (3, 2))
        nodes = pad_trees(drafted.trees)
        assert (nodes.tokens.shape, nodes.ancestors.shape) == ((2, 5), (2, 5, 5))
        positions = compute_positions(nodes.depth, batch.cache.lengths)
        assert positions.tolist() == [[0, 1, 2, 3, 4, 4, 5, 5], [0, 1, 2, 1, 2, 2, 3, 3]]
        masks = build_additive_masks({"full": None}, lambda _: positions, nodes.ancestors, torch.float32, CPU)
        assert masks["full"].shape == (2, 1, 5, 8)

        # 2. One forward, and a verdict for each row.
        outputs = forward_trees(batch, drafted.trees)
        assert {output.logits.shape for output in outputs} == {(5, VOCAB)}
        assert {output.features.shape for output in outputs} == {(5, model.model.config.hidden_size)}
        verdicts = verify(batch, spec.verifier, drafted.trees, outputs)
        for verdict, tree in zip(verdicts, drafted.trees, strict=True):
            assert verdict.tokens[:-1] == tree.tokens[verdict.path].tolist()

        # 3. The first row accepts nodes 2 and 4, the second one none.
        before = [[storage.clone() for storage in layer.storage] for layer in batch.cache.tree_layers]
        accepted = drafted.trees[0].tokens[[2, 4]].tolist()
        verdicts = [Verdict([2, 4], [*accepted, 7], [2, 2]), Verdict([], [8], [2, 2])]
        step_tokens = commit(batch, verdicts)
        assert batch.cache.lengths == [6, 2]
        for layer, copies in zip(batch.cache.tree_layers, before, strict=True):
            for storage, copy in zip(layer.storage, copies, strict=True):
                assert torch.equal(storage[0, :, 3:6], copy[0, :, [3, 5, 7]])
                assert torch.equal(storage[1, :, 1], copy[1, :, 3])
        assert [len(tokens) for tokens in step_tokens] == [4, 2]
        assert [request.root for request in requests] == [7, 8]
        assert requests[0].committed == [*requests[0].prompt, *accepted]
        shapes = [select_features(outputs[row].features, verdicts[row].path).shape for row in range(2)]
        assert shapes == [(3, model.model.config.hidden_size), (1, model.model.config.hidden_size)]
        observe(batch, drafted, outputs, verdicts, step_tokens)
        assert [piece.token_ids for piece in emit(requests, verdicts, outputs)[0]] == [accepted, [7]]
