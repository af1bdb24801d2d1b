"""No loss of any kind of head takes more than 6 bytes a counted position and vocabulary token.

The target is narrow below a large vocabulary, so that distributions and logits are nearly all of a step's memory.
"""

import weakref

import pytest
import torch
from models import seeded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import config_without_files
from transformers import AutoModelForCausalLM, LlamaConfig

from treespec.draft.heads.loading import build_new_head
from treespec.model.target import Target
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.recipes import TRAINING_BY_KIND

TEXTS = 2
LENGTH = 66


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that are alive: `now`, and the `peak` so far."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.counted = 0, 0, set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage(), before)
        self.peak = max(self.peak, self.now)
        return made

    def count(self, storage, before):
        """Count a storage until it is freed, unless an argument has it."""
        if storage._cdata in before or storage._cdata in self.counted:
            return
        self.now += storage.nbytes()
        self.counted.add(storage._cdata)
        weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, key, size):
        self.now -= size
        self.counted.discard(key)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    size = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    return Target(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8192, **size), dtype=torch.float32))


def bytes_each(target, head, kind, loss):
    """The peak of a step in bytes, divided by its counted positions and the vocabulary."""
    generator = seeded(0)
    tokens = torch.randint(target.vocab_size, (TEXTS, LENGTH), generator=generator)
    counted = torch.ones_like(tokens, dtype=torch.bool)
    lengths = torch.full((TEXTS,), LENGTH)
    features = target.compute_features(tokens, head.aux_layers, last=True)
    batch = TrainingBatch(tokens, counted, features, lengths, generator, TRAINING_BY_KIND[kind].recipe.unrolled_steps)
    with Live() as live:
        TRAINING_BY_KIND[kind].load_objective()(
            config_without_files(head=kind, loss=loss), target, head, batch
        ).total.backward()
    return live.peak / (TEXTS * (LENGTH - 2) * target.vocab_size)


CASES = [
    *((kind, "published") for kind in ("eagle", "eagle3", "medusa", "hydra", "hydra++")),
    ("hydra", "tv"),
]


@pytest.mark.parametrize("kind, loss", CASES)
def test_a_step_takes_at_most_six_bytes_a_position_and_token(target, kind, loss):
    assert 0 < bytes_each(target, build_new_head(kind, target), kind, loss) < 6


def test_so_does_a_step_over_a_draft_vocabulary(target):
    """EAGLE-3 over half of the tokens."""
    head = build_new_head("eagle3", target)
    head.restrict(torch.arange(4096), target)
    assert 0 < bytes_each(target, head, "eagle3", "published") < 6
