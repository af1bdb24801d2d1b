"""Whatever `--drafter` names, loaded from disk: the target's very tokens, and the target's distribution."""

import pytest
import torch
from commands import treespec
from head_files import add_tensors, mtp_tensors
from models import as_undrafted
from training import save_model
from transformers import AutoModelForCausalLM

from treespec import load
from treespec.api.trace import trace
from treespec.draft.heads.loading import build_new_head
from treespec.draft.registry import DRAFTERS as ROWS
from treespec.draft.registry import ORACLE_NAME
from treespec.draft.spec import DrafterSpec
from treespec.heads.checkpoint import save_head
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target

TEXT = "the user asks and the assistant answers the question the user asks "
DRAFTERS = {
    **{name: name for name in ROWS if name != ORACLE_NAME},  # test_oracle.py
    **{kind: f"{kind}:{{home}}/{kind}" for kind in HEAD_KINDS},
    "head": "head:{home}/eagle3",
    "model": "model:{home}/small",
    "pard": "pard:{home}/pard,tokens=5",
    "sparse": "sparse:window=8,snapkv=4",
    "suffix": "suffix:{home}/memory",
    "rest": "rest:{home}/store",
}
JOINED = {
    "suffix+eagle": "suffix+eagle:{home}/eagle",
    "suffix+model": "suffix:{home}/joined,nodes=9+model:{home}/small",
    "model+model": "model:{home}/small+{home}/target",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target with sharp distributions, and beside it whatever drafts for it."""
    home = tmp_path_factory.mktemp("drafters")
    folder = save_model(home / "target", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    model.save_pretrained(folder)
    add_tensors(folder, mtp_tensors(model, "mimo"))
    save_model(home / "small", num_hidden_layers=1)
    save_model(home / "pard", num_hidden_layers=1, pard_token=3)
    (home / "texts.txt").write_text(TEXT * 9)
    assert treespec(f"datastore build --target {folder} --data {home}/texts.txt --out {home}/store") == 0
    target = Target(AutoModelForCausalLM.from_pretrained(folder))
    for kind in HEAD_KINDS:
        torch.manual_seed(0)
        save_head(build_new_head(kind, target), home / kind)
    return home


def test_no_drafter_is_left_out():
    assert DRAFTERS.keys() == ROWS.keys() - {ORACLE_NAME}


@pytest.mark.parametrize("kind", sorted({*DRAFTERS, *JOINED} - {ORACLE_NAME}))  # eval alone gives it answers
def test_greedy_answers_are_the_targets_own_tokens(home, kind):
    """Float32, one text, three together, two at a time under another tree and verifier, and one that is traced."""
    spec = load(f"{home}/target", drafter=(DRAFTERS | JOINED)[kind].format(home=home), dtype="float32")
    prompts = [TEXT * 2, "the answer", TEXT]
    as_undrafted(spec, prompts[:1], 5)
    plain, *_ = as_undrafted(spec, prompts, 5)
    if not DrafterSpec.parse((DRAFTERS | JOINED)[kind]).kind.one_hot:
        as_undrafted(spec.configured("2x2", "rrs"), prompts, 5, batch=2)
    pieces = [piece for cycle in trace(spec, prompts[0], max_new_tokens=5) for piece in cycle.answer]
    assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
