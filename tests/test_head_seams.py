"""Which feature meets which token, in training and in drafting: the figures of `Head` and `Pairs`, drawn by heads."""

import pytest
import torch
from models import close, randn, random_head, seeded, target

from treespec.api.spec import Spec
from treespec.draft.heads.loading import build_new_head
from treespec.heads.head import Head
from treespec.heads.llama import Pairs
from treespec.train.losses.objectives import TrainingBatch

LETTERS = "abcde"


def figure_lines(doc):
    """The words of each named line of a figure."""
    lines = {}
    for name in ("feature", "reads", "counts", "step 0", "step 1", "step 2", "first", "then"):
        line = next(x.strip() for x in doc.splitlines() if x.strip().startswith(name + " "))
        lines[name] = line.removeprefix(name).split()
    return lines


FIGURE = figure_lines(Head.forward.__doc__)


def words_after(doc, name):
    """The words after a name of several words, in the line of a figure that begins with it."""
    return next(x.strip().removeprefix(name).split() for x in doc.splitlines() if x.strip().startswith(name))


@torch.no_grad()
def random_weights(kind, model):
    """A head whose every weight is random: published ones begin with zeros and identities."""
    torch.manual_seed(0)
    head = build_new_head(kind, model).eval()
    for weight in head.parameters():
        if weight.requires_grad:
            weight.copy_(0.2 * randn(weight.shape))
    return head


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra", "hydra++"])
def test_a_row_reads_the_feature_and_the_next_token_that_the_figure_draws(kind):
    """The newest token and feature that change a row of step 0."""
    model = target("llama")
    head = random_weights(kind, model)
    generator = seeded(1)
    tokens = torch.randint(3, 60, (1, 5), generator=generator)
    features = randn(1, 3, head.feature_size, generator=generator)
    counts = torch.ones(1, 3, dtype=torch.bool)

    def run(tokens, features):
        return head(tokens, features, counts, 1, model.embed_tokens)[0]

    plain = run(tokens, features)
    newest_token, newest_feature = [None] * 3, [None] * 3
    for i in range(5):
        other = tokens.clone()
        other[0, i] = 61
        for row in (run(other, features) != plain).any(-1).nonzero().flatten().tolist():
            newest_token[row] = LETTERS[i]
    for i in range(3):
        other = features.clone()
        other[0, i] = -other[0, i]
        for row in (run(tokens, other) != plain).any(-1).nonzero().flatten().tolist():
            newest_feature[row] = f"f{i}"
    assert newest_token == FIGURE["reads"][:3]
    assert newest_feature == FIGURE["feature"][:3]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra", "dflash", "p-eagle"])
def test_the_rows_of_each_step_are_for_the_tokens_that_the_figure_draws(kind):
    """Rows that are wanted by `counts` are those that the figure has for d and e."""
    model = target("llama")
    head = random_weights(kind, model)
    generator = seeded(1)
    tokens = torch.randint(3, 60, (1, 5), generator=generator)
    features = randn(1, 3, head.feature_size, generator=generator)
    everything = torch.ones(1, 3, dtype=torch.bool)
    counts = torch.tensor([[mark == "1" for mark in FIGURE["counts"][:3]]])
    assert [LETTERS[i + 2] for i in range(3) if counts[0, i]] == ["d", "e"]
    all_rows = head(tokens, features, everything, 3, model.embed_tokens)
    wanted = head(tokens, features, counts, 3, model.embed_tokens)
    for step in range(3):
        drawn = FIGURE[f"step {step}"][: 3 - step]
        assert drawn == list(LETTERS[step + 2 :])
        kept = torch.tensor([letter in "de" for letter in drawn])
        close(wanted[step], all_rows[step][kept], 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra", "dflash", "p-eagle"])
def test_draft_logits_are_compared_with_the_target_logits_that_the_figure_draws(kind):
    """Rows 0 and 1 of step 1, and the positions whose target states training hands to the loss for that step."""
    model = target("llama")
    head = random_weights(kind, model)
    drawn_rows = [int(word) for word in words_after(Head.project.__doc__, "states of step 1")[1:4:2]]
    drawn_tokens = words_after(Head.project.__doc__, "target's logits at")[:2]
    counts = torch.tensor([[False, False] + [mark == "1" for mark in FIGURE["counts"][:3]]])
    tokens = torch.randint(3, 60, (1, 5), generator=seeded(1))
    features = randn(1, 3, head.feature_size, generator=seeded(2))
    positions = torch.arange(5)[None, :, None]
    batch = TrainingBatch(tokens, counts, positions, torch.tensor([5]), seeded(3), steps=2)

    everything = torch.ones_like(batch.counts)
    all_states = head(tokens, features, everything, 2, model.embed_tokens)[1]
    states = head(tokens, features, batch.counts, 2, model.embed_tokens)[1]
    logits = head.project(states, 1, model)
    close(logits, head.project(all_states, 1, model)[drawn_rows], 1e-5)
    compared = batch.select_states(positions)[batch.places >= 1].flatten().tolist()
    assert [LETTERS[position] for position in compared] == drawn_tokens
    assert len(logits) == len(compared)


@torch.no_grad()
def test_a_block_row_sees_the_columns_that_the_figure_draws(monkeypatch):
    """The second cycle after a prompt of four tokens: three pairs are cached, and the fourth is new."""
    model = target("llama")
    torch.manual_seed(0)
    head = build_new_head("dflash", model, levels=2).eval()
    asked = []
    run = type(head).run

    def spy(self, pairs, *more):
        asked.append(pairs)
        return run(self, pairs, *more)

    monkeypatch.setattr(type(head), "run", spy)
    Spec(model, head, "chain:2").generate([5, 9, 13, 21], max_new_tokens=2, temperature=0.0)
    pairs = asked[1]
    assert pairs.tokens.shape == (1, 1)
    assert pairs.positions[0].tolist() == [int(word) for word in words_after(Pairs.__doc__, "position ")]
    marks = [["x" if seen else "." for seen in row] for row in pairs.seen[0].tolist()]
    assert marks[0] == words_after(Pairs.__doc__, "new pair")[:7]
    assert marks[1:] == [words_after(Pairs.__doc__, "block row")[:7]] * 3


@torch.no_grad()
def test_while_it_drafts_each_feature_meets_the_token_committed_after_it(monkeypatch):
    """The pairs that a proposer hands its head: the prompt's, and that of the root."""
    model = target("llama")
    head = random_head(model)
    asked = []
    step = type(head).forward_step

    def spy(self, tokens, features, *more, **named):
        asked.append((tokens.clone(), features.clone()))
        return step(self, tokens, features, *more, **named)

    monkeypatch.setattr(type(head), "forward_step", spy)
    prompt = [5, 9, 13, 21, 34]
    output = Spec(model, head, "chain:2").generate(prompt, max_new_tokens=4, temperature=0.0)
    letters = dict(zip([*prompt, output.token_ids[0]], "abcder", strict=True))
    target_features = model.compute_features(torch.tensor([prompt]))[0]
    drawn = []
    for tokens, features in asked[:3]:
        pairs = []
        for token, feature in zip(tokens[0].tolist(), features[0], strict=True):
            distances = (target_features - feature).abs().amax(-1)
            if distances.min() < 1e-5:  # deeper levels see features of the head's own
                pairs.append(f"f{int(distances.argmin())},{letters[token]}")
        if pairs:
            drawn.append(pairs)
    assert drawn == [FIGURE["first"][:4], FIGURE["then"][:1]]
