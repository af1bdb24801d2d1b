"""What the docstrings draw on five tokens is what the code computes."""

import pytest
import torch
from models import seeded, target, zeros

from treespec.draft.forced import ForcedChains
from treespec.draft.postponed import Observation, join_observations
from treespec.engine.batch import Batch
from treespec.engine.request import Request
from treespec.engine.stats import Stats
from treespec.heads.formats.vocabulary import read_mapping, to_offsets
from treespec.heads.layers import mask_last_seen
from treespec.heads.unrolled import build_window_mask
from treespec.kernels.ops import load_kernels
from treespec.model.attention import expand_mask
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import ColumnMove, flatten_moves
from treespec.model.cpu.experts import multiply_by_expert
from treespec.model.masks import build_additive_masks, pad_trees, split_causal_chunks
from treespec.model.recurrent.model import find_last_steps
from treespec.model.recurrent.rows import build_path_rows
from treespec.model.rotary import LengthFactors
from treespec.sampling.noise import Noise
from treespec.sampling.params import SamplingParams
from treespec.sampling.processors import Penalties
from treespec.sampling.sampler import ForcedTokens, Sampler, TargetDistributions, list_node_paths
from treespec.serve.protocol import build_text_logprobs
from treespec.text.ending import Ending
from treespec.text.entries import parse_conversation
from treespec.text.marks import Marks, find_spans
from treespec.train.data.batches import iterate_forwards, split_epoch
from treespec.train.losses.objectives import TrainingBatch
from treespec.trees.layout import get_layout
from treespec.trees.mask import build_ancestor_mask, build_committed_mask, compute_positions
from treespec.trees.most_likely import build_most_likely_tree, estimate_length
from treespec.trees.sequoia import solve_trees
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws, TokenTree, cut_below, prepend_chain
from treespec.verify.topk import TopK

CPU = torch.device("cpu")
PARENTS = torch.tensor([-1, 0, 0, 1, 2])
DEPTH = torch.tensor([0, 1, 1, 2, 2])
FIVE = TokenTree(torch.tensor([50, 51, 52, 53, 54]), PARENTS, DEPTH, build_ancestor_mask(PARENTS))  # r a b c d


def masks_of(rows, kinds):
    """Additive masks as they are drawn: 0 where a node sees a column, else -."""
    return {kind: ["".join("0" if x == 0 else "-" for x in row) for row in rows[kind][0, 0]] for kind in kinds}


def test_a_window_of_two_hides_what_lies_two_positions_back():
    parents = torch.tensor([-1, 0, 0])
    places = torch.tensor([[0, 1, 2, 3, 3]])
    windows = {"full_attention": None, "sliding_attention": 2}
    masks = build_additive_masks(windows, lambda _: places, build_ancestor_mask(parents)[None], torch.float32, CPU)
    assert masks_of(masks, windows) == {
        "full_attention": ["000--", "0000-", "000-0"],
        "sliding_attention": ["-00--", "--00-", "--0-0"],
    }


def test_a_smaller_tree_is_padded_with_nodes_that_see_themselves():
    three = TokenTree(FIVE.tokens[:3], PARENTS[:3], DEPTH[:3], FIVE.ancestors[:3, :3])
    nodes = pad_trees([FIVE, three])
    assert nodes.tokens.tolist() == [[50, 51, 52, 53, 54], [50, 51, 52, 0, 0]]
    assert nodes.ancestors[1].int().tolist()[3:] == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert torch.equal(nodes.ancestors[0], FIVE.ancestors)


def test_a_chunk_stands_behind_the_longest_text():
    cache = TreeCache(1)
    cache.rewind([2, 4])
    (chunk,) = split_causal_chunks(cache, [3, 1], lambda columns: 8, CPU)
    assert chunk.positions[0].tolist() == [2, 3, 4]
    assert chunk.positions[1, 0] == 4
    assert chunk.seen[0, 1].nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert chunk.seen[1, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert chunk.taken == [3, 1]


def test_commit_moves_the_accepted_columns_to_the_end_of_each_text():
    cache = TreeCache(1, capacity=16)
    cache.rewind([0, 0])
    text = torch.tensor([[10.0, 11, 12, 13], [20, 21, 0, 0]])[:, None, :, None]
    cache.update(text, text, 0)
    cache.commit([range(4), range(2)])
    tree = torch.arange(5.0).expand(2, 1, 5)[..., None]
    cache.update(tree, tree, 0)
    cache.commit([[0, 2], [0, 1, 4]])
    keys = cache.tree_layers[0].storage[0][:, 0, :, 0]
    assert cache.lengths == [6, 5]
    assert keys[0, :6].tolist() == [10, 11, 12, 13, 0, 2]
    assert keys[1, :5].tolist() == [20, 21, 0, 1, 4]


def test_a_move_of_a_row_reads_and_writes_a_column_of_each_head():
    moves = [ColumnMove(row=1, source=6, place=4)]
    assert flatten_moves(moves, heads=2, capacity=8).tolist() == [[22, 30], [20, 28]]


def test_a_mask_of_the_last_columns_is_widened_by_zeros():
    mask = torch.full((1, 1, 1, 3), -1.0)
    assert expand_mask(mask, 5).flatten().tolist() == [0, 0, -1, -1, -1]


def test_rows_go_to_their_experts_in_order():
    experts = torch.nn.ModuleList(torch.nn.Threshold(1e9, float(number)) for number in range(3))
    assert multiply_by_expert(experts, torch.zeros(5, 1), [2, 0, 3]).flatten().tolist() == [0, 0, 2, 2, 2]


def test_committed_columns_end_with_each_text():
    assert build_committed_mask([3, 1], CPU).int().tolist() == [[[1, 1, 1]], [[1, 0, 0]]]


def test_levels_of_a_static_tree_hold_its_frontiers():
    root, below = get_layout(StaticTree(((0,), (2,), (0, 0), (2, 1))), CPU).levels
    assert (root.nodes.tolist(), root.draws.tolist(), root.first) == ([0], [3], 1)
    assert (root.rows.tolist(), root.columns.tolist()) == ([0, 0], [0, 2])
    assert (below.nodes.tolist(), below.draws.tolist(), below.first) == ([1, 2], [1, 2], 3)
    assert (below.rows.tolist(), below.columns.tolist()) == ([0, 1], [0, 1])
    assert below.parent_rows.tolist() == [0, 0]


def test_a_tree_below_a_chain_and_a_tree_cut_at_a_depth():
    three = TokenTree(
        torch.tensor([7, 8, 9]), torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), FIVE.ancestors[:3, :3]
    )
    hung = prepend_chain(torch.tensor([5]), [6, 7], three)
    assert hung.tokens.tolist() == [5, 6, 7, 8, 9]
    assert hung.parents.tolist() == [-1, 0, 1, 2, 2]
    assert torch.equal(hung.ancestors, build_ancestor_mask(hung.parents))

    draws = Drafts(torch.tensor([0, 1, 2]), torch.full((3, 5), 0.2), Draws(torch.zeros(3, 2, dtype=torch.int64)))
    cut, kept = cut_below(TokenTree(FIVE.tokens, PARENTS, DEPTH, FIVE.ancestors, draws), 1)
    assert kept == cut.depth.new_tensor([0, 1, 2]).tolist()
    assert cut.drafts is not None
    assert cut.drafts.nodes.tolist() == [0]


def test_forced_tokens_stand_between_the_root_and_the_drafted_tree():
    """Drawn in treespec/draft/forced.py: r to d are 50 to 54."""
    three = TokenTree(
        torch.tensor([52, 53, 54]), torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), FIVE.ancestors[:3, :3]
    )
    chains = ForcedChains([50], [ForcedTokens([51, 52])], [52], torch.tensor([52]))
    (hung,) = chains.prepend_to([three], TopK(), [seeded(0)])
    assert chains.list_last_tokens(0) == [50, 51, 52]
    assert hung.tokens.tolist() == [50, 51, 52, 53, 54]
    assert hung.parents.tolist() == [-1, 0, 1, 2, 2]


def test_sequoias_table_and_the_most_likely_nodes():
    best = solve_trees([0.6, 0.3], 3, 2)
    assert best.tokens[1, 2:].tolist() == pytest.approx([1.6, 1.9])
    assert best.tokens[2, 3] == pytest.approx(1.96)
    assert solve_trees([0.6, 0.3], 3, 2, [0.5, 0.4]).tokens[1:, 3].tolist() == pytest.approx([1.9, 1.9])
    table = [[0.6, 0.2], [0.5, 0.2]]
    tree = build_most_likely_tree(table, 5)
    assert tree.paths == ((), (0,), (1,), (0, 0), (0, 1))
    assert estimate_length(tree, table) == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0.12)


def test_each_leaf_of_a_tree_is_a_row_of_a_recurrent_layer():
    rows = build_path_rows(FIVE.ancestors[None], DEPTH[None])
    assert rows.columns.tolist() == [[0, 1, 3], [0, 2, 4]]
    assert rows.outputs.tolist() == [[0, 1, 4, 2, 5]]
    assert find_last_steps(rows, [[0, 2, 4]]) == {0: (1, 2)}
    assert find_last_steps(rows, [[]]) == {}


def test_a_draft_vocabulary_of_three_tokens():
    """A target of the tokens a to e, and a head that drafts b, c and e."""
    tensors = to_offsets(torch.tensor([1, 2, 4]), 5)
    assert tensors["d2t"].tolist() == [1, 1, 2]
    assert tensors["t2d"].int().tolist() == [0, 1, 1, 0, 1]
    assert read_mapping(tensors, 5).tokens.tolist() == [1, 2, 4]


def test_a_window_counts_the_columns_that_a_row_sees():
    """Node 3's parent is node 1; two pairs stand before the tree."""
    seen = torch.tensor([True, True, False, True, False, True])
    assert mask_last_seen(seen, 3).int().tolist() == [0, 1, 0, 1, 0, 1]


def test_an_own_column_takes_a_place_in_the_window():
    mask = build_window_mask(4, 1, 3, CPU)
    assert mask[2:].int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]


def test_a_place_says_how_many_steps_reach_a_state():
    answer = torch.tensor([[False, False, False, True, True]])  # d and e are the assistant's
    states = torch.arange(5)[None, :, None]
    batch = TrainingBatch(torch.arange(5)[None], answer, states, torch.tensor([5]), torch.Generator())
    assert batch.places.tolist() == [1, 2]
    assert batch.select_states(states).flatten().tolist() == [2, 3]


def test_conversations_of_similar_lengths_share_a_batch():
    def batches_of(epoch):
        return sorted(split_epoch([3, 1, 5, 2, 4], 2, 0, epoch), reverse=True)

    assert batches_of(0) == [[1, 3], [0, 4]]
    for process, conversations in enumerate(([1, 0], [3, 4])):
        forwards = iterate_forwards(0, batches_of, process, processes=2)
        assert [next(forwards).conversations for _ in range(2)] == [[number] for number in conversations]


class RowRecorder:
    """A drafter of a batch whose sequences are known by name, as those of the cache are by their lengths."""

    aux_layers = ()

    def __init__(self, names=()):
        self.names = list(names)

    def new(self):
        return RowRecorder([None])

    def enter(self, memory):
        pass

    def observe(self, features, tokens):
        self.names = [len(sequence) for sequence in tokens]

    def join(self, others, row=None):
        for other in others:
            self.names += other.names if row is None else [other.names[row]]

    def select(self, rows):
        self.names = [self.names[row] for row in rows]

    def rewind(self, lengths):
        pass


def request_of(tokens, temperature=0.0):
    sampler = Sampler(SamplingParams(temperature))
    return Request([*range(3, 3 + tokens)], Ending(None, frozenset(), (), 9), seeded(0), Stats(), sampler)


def test_an_entering_request_takes_a_free_row_and_the_last_row_fills_the_next():
    """Requests A to F have prompts of two to seven tokens. The cache holds all tokens of a prompt but the last."""
    requests = [request_of(tokens) for tokens in range(2, 8)]
    a, b, c, d, e, f = requests
    with torch.inference_mode():
        batch = Batch(target("llama"), RowRecorder([None]))
        batch.admit_and_release([a, b, c, d, e])
        assert batch.requests == [a, b, c, d, e]
        b.cancelled = d.cancelled = True
        batch.admit_and_release([f])
    assert batch.requests == [a, f, c, e]
    assert batch.cache.lengths == [1, 6, 3, 5]
    assert batch.drafter.names == [2, 7, 4, 6]


def test_prompts_are_prefilled_in_turns():
    a, b = request_of(5), request_of(3)
    batch = Batch(target("llama"), None)
    calls = []
    with torch.inference_mode():
        for entering in ([a, b], [], []):
            batch.admit_and_release(entering, 2)
            calls.append((len(a.committed), len(b.committed), list(batch.requests)))
    assert calls == [(2, 0, []), (2, 2, [b]), (4, 2, [b, a])]
    assert (a.root, b.root) == (a.prompt[4], b.prompt[2])


def test_a_processor_counts_the_path_of_each_node():
    """Tokens a to e are 0 to 4; the tree is that of `TreeLogitsProcessor`."""
    tree = TokenTree(torch.tensor([9, 0, 1, 2, 3]), PARENTS, DEPTH, build_ancestor_mask(PARENTS))
    paths = list_node_paths(tree)
    assert paths == [(), (0,), (1,), (0, 2), (1, 3)]
    sampler = Sampler(SamplingParams(1.0), [Penalties(frequency=1.0)])
    sampler.append([0])
    penalties = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [1, 1, 0, 0, 0], [2, 0, 1, 0, 0], [1, 1, 0, 1, 0]]
    assert (-sampler.process_logits(paths, zeros(5, 5))).tolist() == penalties
    nodes = torch.tensor([0, 2, 4])
    shares = TargetDistributions(zeros(5, 5), sampler, tree)[nodes]
    torch.testing.assert_close(shares, (-torch.tensor(penalties, dtype=torch.float32))[nodes].softmax(-1))


def test_all_nodes_of_a_level_share_the_noise_of_one_position():
    p, noise = torch.tensor([-0.5, -1.2, -2.3]), torch.tensor([-0.9, 1.1, 0.4])
    assert (p + noise).tolist() == pytest.approx([-1.4, -0.1, -1.9])
    sampler = Sampler(SamplingParams(1.0))
    sampler.noise = Noise(5, 64, CPU)
    sampler.noise.position = 7
    levels = {7 + depth: sampler.noise.get_level(depth) for depth in range(3)}
    scores = sampler.score_tokens(torch.zeros(2, 64), 1)
    assert torch.equal(scores, levels[8].expand(2, -1))
    sampler.append([51, 53])
    assert sampler.noise.position == 9
    assert torch.equal(sampler.noise.get_level(0), levels[9])
    assert not torch.equal(levels[8], levels[9])


def test_observations_of_two_cycles_are_joined_to_one():
    cycles = [
        Observation([torch.tensor([[1.0], [2.0]])], [torch.tensor([51, 52, 53])]),
        Observation([torch.tensor([[3.0]])], [torch.tensor([53, 54])]),
    ]
    joined = join_observations(cycles)
    assert [row.tolist() for row in joined.features] == [[[1.0], [2.0], [3.0]]]
    assert [row.tolist() for row in joined.tokens] == [[51, 52, 53, 54]]


def test_trees_of_two_texts_see_their_texts_and_ancestors():
    three = TokenTree(FIVE.tokens[:3], PARENTS[:3], DEPTH[:3], FIVE.ancestors[:3, :3])
    nodes = pad_trees([FIVE, three])
    positions = compute_positions(nodes.depth, [3, 1])
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 4, 5, 5]
    assert positions[1, [0, 3, 4, 5]].tolist() == [0, 1, 2, 2]
    trees = torch.cat([build_committed_mask([3, 1], CPU).expand(-1, 5, -1), nodes.ancestors], dim=2)
    assert trees[0, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 7]  # a b c 0 2 4
    assert trees[1, 2].nonzero().flatten().tolist() == [0, 3, 5]  # p 0 2


class PositionsAsFactors(torch.nn.Module):
    """A rotary module whose factors are the positions that it is asked for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(1))

    def forward(self, x, position_ids):
        return (position_ids[..., None].float(),)


def test_siblings_are_rotated_alike_and_no_node_beyond_the_limit():
    positions = compute_positions(DEPTH[None], [3])[:, 3:]
    assert positions.tolist() == [[3, 4, 4, 5, 5]]
    module = PositionsAsFactors()
    factors = LengthFactors(module, 5)
    with factors.by_text(torch.zeros(1, 5, dtype=torch.bool)):
        (rotated,) = module.forward(torch.zeros(1), positions)
    assert rotated.flatten().tolist() == [3, 4, 4, 4, 4]
    cache = TreeCache(1)
    cache.rewind([3])
    assert factors.find_deepest(cache) == [1]


def test_an_answer_lies_between_its_header_and_its_end_mark():
    assert find_spans("<s>H<|head|>Y</s>", Marks("<|head|>", ("</s>",))) == [(12, 17)]


def test_labels_say_which_tokens_count_and_padding_is_dropped():
    row = {"input_ids": [1, 9, 5, 7, 0], "attention_mask": [1, 1, 1, 1, 0], "labels": [-100, -100, 5, 7, -100]}
    (tokens,) = parse_conversation("", row).tokens
    assert tokens == ([1, 9, 5, 7], [False, False, True, True])


def test_the_offset_of_a_token_counts_the_characters_before_it():
    tokens = [{"token": text, "logprob": -1.0, "top_logprobs": []} for text in ("Hel", "lo", "!")]
    logprobs = build_text_logprobs(tokens, 5)
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["Hel", "lo", "!"], [5, 8, 10])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_columns_moved_by_a_kernel_are_those_of_an_index_copy(monkeypatch, dtype):
    """Row 1 accepts every other one of 20 nodes behind a text of 3; row 0 accepts one."""
    nodes = [[4], list(range(1, 20, 2))]
    found, expected = [], []
    for kernels, storage in ((load_kernels(), found), (None, expected)):
        monkeypatch.setattr("treespec.kernels.ops.load_kernels", lambda kernels=kernels: kernels)
        cache = TreeCache(2)
        generator = seeded(0)
        cache.rewind([0, 0])
        for columns, accepted in ((3, [range(3)] * 2), (20, nodes)):
            keys = torch.randn(2, 3, columns, 4, generator=generator).to(dtype)
            for layer in range(2):
                cache.update(keys, layer - keys, layer)
            cache.commit(accepted)
        for layer in cache.tree_layers:
            storage += layer.storage
    for states, wanted in zip(found, expected, strict=True):
        assert torch.equal(states, wanted)
