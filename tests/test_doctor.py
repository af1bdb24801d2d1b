"""`treespec doctor` names the fault that was planted in a head, and none in the head itself."""

import copy
import json

import pytest
import torch
from commands import complains
from drafters import build_head
from models import CONFIGS, VOCAB, random_model, seeded, target
from torch.nn.functional import cross_entropy
from training import tokenizer

from treespec.api.spec import Spec
from treespec.draft.heads.loading import attach_to_target, build_new_head, rebuild_head
from treespec.eval.config import DoctorConfig
from treespec.eval.doctor import MIN_CERTAIN_AGREEMENT, compute_share_ceiling, diagnose_head
from treespec.eval.texts import Passage
from treespec.eval.training_text import diagnose_template, diagnose_training_text, find_template_ending
from treespec.heads.registry import HEAD_KINDS
from treespec.model.target import Target


def completions(model, count, length):
    """Random prompts, and what follows greedily."""
    prompts = torch.randint(3, VOCAB, (count, 8), generator=seeded(count))
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.model.generate(prompts, max_new_tokens=length, **how)
    return [Passage(one, torch.arange(len(one)) >= 8, i) for i, one in enumerate(tokens)]


@pytest.fixture(scope="module")
def learnt():
    """A target, an EAGLE-3 head that learnt its completions for some seconds, and others to examine it on."""
    # 1. A target that is sure of much, and whose layers differ.
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 5
    own = random_model(config)
    for name, weight in own.named_parameters():
        weight.data *= 0.3 if "layers" in name and weight.ndim > 1 else 4 if "lm_head" in name else 1
    model = Target(own)

    # 2. A head that reads layers 1 to 3, and learns four steps.
    head = build_new_head("eagle3", model, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    attach_to_target(head, model, "it")
    texts = torch.stack([passage.tokens for passage in completions(model, 400, 24)])
    features = model.compute_features(texts, head.aux_layers)
    wanted = model.compute_output_logits(model.compute_features(texts)).argmax(-1)
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3)
    for step in range(180):
        if step == 60:
            young = copy.deepcopy(head)
        rows = torch.randint(len(texts), (32,), generator=seeded(step))
        losses = [
            cross_entropy(head.compute_logits(x).flatten(0, 1), wanted[rows, d : d + x.shape[1]].flatten())
            for d, x in enumerate(head.unroll_steps(texts[rows], head.fuse(features[rows]), 4), 1)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return Spec(model, head.eval()), completions(model, 45, 24), young


@pytest.mark.parametrize("said", ["Off-policy text", "Chat template", None])
def test_training_on_other_texts_than_the_targets_answers_is_diagnosed(tmp_path, said):
    # 1. Answers of one target, half of them greedy, or those of another one.
    words = tokenizer()
    config = CONFIGS["llama"]()
    config.vocab_size = len(words)
    own, other = (Spec(Target(random_model(config, seed), words), None) for seed in (0, 1))
    ending = [7, 8] if said == "Chat template" else words("\n<s>assistant: ")["input_ids"]
    prompts = [[*row, *ending] for row in torch.randint(3, 280, (16, 6), generator=seeded(0)).tolist()]
    writer = other if said == "Off-policy text" else own
    lines = []
    for temperature in (0, 1):
        half = prompts[temperature::2]
        answers = writer.generate(half, max_new_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
        for prompt, answer in zip(half, answers, strict=True):
            mask = [0] * len(prompt) + [1] * 30
            lines.append(json.dumps({"input_ids": prompt + answer.token_ids, "loss_mask": mask}))
    file = tmp_path / "learnt.jsonl"
    file.write_text("\n".join(lines))

    # 2. What the doctor says.
    options = DoctorConfig(target="own", head="head", data=str(file), max_new_tokens=30)
    assert [line.partition(":")[0] for line in diagnose_training_text(options, own)[1]] == ([said] if said else [])

    # 3. Of one answer it says nothing.
    file.write_text(lines[0])
    with complains("needs two answers"):
        diagnose_training_text(options, own)


def test_questions_that_end_alike_are_not_taken_for_the_template():
    """All questions end in one sentence, as those of GSM8K do; the training's end in others, and one has a thought."""
    words = tokenizer()
    config = CONFIGS["llama"]()
    config.vocab_size = len(words)
    spec = Spec(Target(random_model(config), words), None)
    assert find_template_ending(spec) == "\n<s>assistant: "
    rendered = [f"<s>user: {text}\n<s>assistant: " for text in ("why ?", "because the user asks.")]
    rendered[1] += "<think></think>"
    assert diagnose_template(spec, [words(text)["input_ids"] for text in rendered]) == []
    other = [f"USER: {text} ASSISTANT:" for text in ("why ?", "who ?")]
    (line,) = diagnose_template(spec, [words(text)["input_ids"] for text in other])
    assert line.startswith(r"Chat template: 2 of 2 training prompts lack '\n<s>assistant: '")
    assert line.endswith("end in ' ? ASSISTANT:'.")


def other_target(head):
    """The order of hidden numbers is of no account to a target, and all to its head."""
    head.fc.weight.data = head.fc.weight.data[:, torch.randperm(head.fc.in_features, generator=seeded(0))]


def flat(head):
    head.lm_head.weight.data *= 0.5


ROPE = {"rope_theta": 10.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
FEW = 16  # passages that show most faults
MANY = 32
PLANTED = {
    "Layers off by one": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "norm_before_residual": {"norm_before_residual": True},
    "Rotary base": ROPE,
    "Untrained, or for another target": other_target,
    "Flat": flat,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(learnt, fault):
    spec, texts, _ = learnt
    planted = PLANTED[fault]
    faulty = rebuild_head(copy.deepcopy(spec.head), spec.target, **planted if isinstance(planted, dict) else {})
    if callable(planted):
        planted(faulty)
    texts = texts[: MANY if fault == "Layers off by one" else FEW]  # whose gain is small
    assert [line for line in diagnose_head(Spec(spec.target, faulty), texts)[1] if line.startswith(fault)]


def test_a_head_trained_for_a_third_of_the_time_is_diagnosed(learnt):
    spec, texts, young = learnt
    verdict = diagnose_head(Spec(spec.target, young), texts[:FEW])[1]
    assert [line for line in verdict if line.startswith("Little trained")]


def test_a_sound_head_is_diagnosed_with_little_training_at_most(learnt):
    spec, texts, _ = learnt
    tables, verdict = diagnose_head(spec, texts[:FEW])
    assert all(line.startswith("Little trained") for line in verdict)
    assert float(tables[0].rows[0]["step 1"].rstrip("%")) > 50
    for few in (texts[:2], texts[2:4], texts[4:7]):  # too few to tell anything
        assert not diagnose_head(spec, few)[1]


def test_wrong_drafts_of_two_sure_tokens_tell_nothing():
    assert compute_share_ceiling(0.0, 2) > MIN_CERTAIN_AGREEMENT > compute_share_ceiling(0.0, 3)


@pytest.fixture(scope="module")
def few_texts():
    return completions(target("llama"), 6, 16)


DRAFTED_ALIKE = ("eagle4", "hydra", "dflash2", "domino", "dspine")  # as eagle3, hydra++ and dspark: slow tests
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in DRAFTED_ALIKE)) for kind in HEAD_KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_head_of_any_kind_is_told_to_be_one(kind, few_texts):
    model = target("llama")
    torch.manual_seed(0)
    head = build_head(model, kind) if kind.startswith(("medusa", "hydra")) else build_new_head(kind, model)
    spec = Spec(model, head.eval())
    assert diagnose_head(spec, few_texts)[1][0].startswith("Untrained, or for another target")
