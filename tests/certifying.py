"""A tiny target, a draft model that errs, and how much of them is sampled."""

from functools import cache

import torch
import transformers as hf
from equality import seeded
from models import GROUPED, random_model

from treespec.api.spec import Spec
from treespec.draft.calibration import Calibration
from treespec.draft.models.model import ModelProposer
from treespec.eval.config import CertifyConfig
from treespec.model.target import Target

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
CONFIG = CertifyConfig(target="target", head="head", tokens=400, length=24, top_k=5)
ONE_LAYER = {"vocab_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": False, "eos_token_id": None}


@cache
def model(noise: float) -> Target:
    """A random Llama of 32 tokens; its output embedding has so much noise, as a share."""
    known = random_model(hf.LlamaConfig(**GROUPED | ONE_LAYER))
    weight = known.lm_head.weight
    with torch.no_grad():
        weight += noise * 0.25 * torch.randn(weight.shape, generator=seeded(1))
    return Target(known)


def tiny(tree: str, verifier: str, calibration: Calibration | None = None) -> Spec:
    proposer = ModelProposer(model(1.0), model(0.0))
    return Spec(model(0.0), proposer, tree, verifier, calibration=calibration)
