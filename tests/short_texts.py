"""The law of all texts of 3 tokens of 4, by χ²."""

import itertools
from collections import Counter
from functools import cache

import torch
import transformers as hf
from models import GROUPED, random_model
from scipy.stats import chi2
from test_sequence_law import chi_square

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs


@cache
def four_tokens():
    return Target(random_model(hf.LlamaConfig(**GROUPED | {"vocab_size": 4, "eos_token_id": None}), seed=2))


def check_law(proposer, tree, verifier, prompt):
    """400 texts of `four_tokens`, decoded together; fails by chance once in 10 000."""
    texts = list(itertools.product(range(4), repeat=3))
    with torch.no_grad():
        rows = four_tokens().model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, len(prompt) - 1 : -1]
    laws = probs(rows.double(), SamplingParams(1.0)).gather(2, torch.tensor(texts)[..., None]).prod(1)[:, 0]
    spec = Spec(four_tokens(), proposer, tree, verifier)
    outputs = spec.generate([prompt] * 400, temperature=1.0, max_new_tokens=3, seed=7, batch=100)
    seen = Counter(tuple(out.token_ids) for out in outputs)
    statistic, freedom = chi_square([seen[text] for text in texts], laws.tolist())
    assert freedom > 8
    assert statistic < chi2.isf(1e-4, freedom)
