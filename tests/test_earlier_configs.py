"""What an earlier version saved beside its results is still the same run to this one."""

from dataclasses import asdict, fields, replace

import pytest

from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.bench.config import BenchConfig
from treespec.eval.certify.config import CertifyConfig
from treespec.eval.mtbench.config import EvalConfig
from treespec.eval.mtbench.record import read_record, record_of
from treespec.files import write_json
from treespec.train.config import TrainConfig
from treespec.train.eagle3_options import Eagle3Options
from treespec.train.kinds import recipe_of
from treespec.train.record import changes, continued

# fmt: off
SAVED = {  # by version 0.1.0, all defaults
    EvalConfig: {'allow_lossy': False,
     'baseline': True,
     'batch': 1,
     'compile': False,
     'device_map': 'auto',
     'drafter': None,
     'dtype': 'auto',
     'head': 'h',
     'limit': None,
     'max_new_tokens': 1024,
     'out': 'out',
     'questions': 'builtin',
     'resamples': 1000,
     'seed': 0,
     'target': 'org/T',
     'temperature': '0',
     'template': None,
     'top_k': 0,
     'top_p': 1.0,
     'tree': None,
     'trust_remote_code': False,
     'turns': None,
     'verifier': 'auto',
     'warm_up': 2},
    TrainConfig: {'accumulate': 1,
     'batch_size': 4,
     'beta1': 0.9,
     'beta2': 0.95,
     'bias': True,
     'calibrate': True,
     'checkpoint_every': 500,
     'clip': 0.5,
     'data': 'd.jsonl',
     'depth_decay': 0.8,
     'device_map': None,
     'draft_heads': None,
     'draft_steps': 5,
     'draft_vocab': None,
     'dtype': 'auto',
     'epochs': None,
     'feature_weight': 1.0,
     'features': None,
     'head': 'eagle',
     'held_out': 0.02,
     'learning_rate': None,
     'max_length': 2048,
     'max_steps': 0,
     'minutes': 0.0,
     'mixed_precision': 'no',
     'noise': 0.1,
     'out': 'out',
     'seed': 0,
     'step_decay': 0.8,
     'target': 'org/T',
     'template': None,
     'token_weight': 0.1,
     'tracker': None,
     'trust_remote_code': False,
     'unrolled_steps': 7,
     'validate_every': 1000,
     'validate_on': 64,
     'warm_up': None,
     'weight_decay': None},
    CertifyConfig: {'allow_lossy': False,
     'batch': 4,
     'device_map': 'auto',
     'drafter': None,
     'dtype': 'float32',
     'error': 0.001,
     'greedy_tokens': 64,
     'head': 'h',
     'length': 64,
     'limit': 8,
     'out': 'certificate.json',
     'questions': 'builtin',
     'seed': 0,
     'target': 'org/T',
     'temperature': 1.0,
     'template': None,
     'tokens': 20000,
     'top_k': 20,
     'top_p': 0.9,
     'tree': None,
     'trust_remote_code': False,
     'verifier': 'auto'},
    AcceptanceConfig: {'answers_temperature': 1.0,
     'device_map': 'auto',
     'draft_temperature': None,
     'draws': None,
     'dtype': 'auto',
     'head': 'h',
     'laws': None,
     'limit': None,
     'max_length': 1024,
     'max_new_tokens': 256,
     'out': 'out',
     'positions': 200,
     'preset': None,
     'questions': 'builtin',
     'samples': None,
     'seed': 0,
     'step': 1,
     'target': 'org/T',
     'temperature': None,
     'template': None,
     'text': None,
     'top_k': None,
     'top_p': 1.0,
     'trust_remote_code': False,
     'verifier': None},
    BenchConfig: {'allow_lossy': False,
     'assistant': None,
     'batches': None,
     'compile': False,
     'contexts': None,
     'device_map': 'auto',
     'drafter': None,
     'dtype': 'auto',
     'head': 'h',
     'limit': None,
     'max_new_tokens': 64,
     'out': 'out',
     'questions': 'builtin',
     'rounds': 20,
     'seed': 0,
     'target': 'org/T',
     'temperature': '0,1',
     'trust_remote_code': False,
     'turns': 1,
     'verifier': 'auto'},
}
# fmt: on
REMOVED = {"compile"}
VARIANT = {"load_in", "revision"}
NEWER = {  # options that the earlier version lacked
    AcceptanceConfig: VARIANT,
    BenchConfig: {"template", "per_category", *VARIANT},
    EvalConfig: {"categories", "per_category", "run_code", "memory", *VARIANT},
    CertifyConfig: {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", *VARIANT},
    TrainConfig: {
        *VARIANT,
        *("first_weights", "loss", "from_head", "loss_vocab", "save_dtype", "decay", "last_rate", "dropout", "grow_at"),
        *("freeze_output", "decode_on", "decode_tokens", "patience", "feature_dtype", "shard_target"),
        *(field.name for field in fields(Eagle3Options)),
    },
}
# options whose default is the kind of head's own now, or the hardware's
OF_KIND = {"unrolled_steps", "accumulate", "beta2", "clip", "mixed_precision"}


@pytest.mark.parametrize("kind", SAVED, ids=lambda kind: kind.__name__)
def test_a_saved_configuration_and_its_defaults_are_unchanged(kind):
    saved = {name: value for name, value in SAVED[kind].items() if name not in REMOVED}
    saved |= dict.fromkeys(OF_KIND & saved.keys())
    again = asdict(kind(**saved))
    assert {name: again[name] for name in saved} == saved
    assert again.keys() - saved.keys() == NEWER.get(kind, set())
    required = {name: saved[name] for name in ("target", "head", "out", "data") if name in saved}
    assert asdict(kind(**required)) == again


def test_an_evaluation_of_an_earlier_version_goes_on(tmp_path):
    config = EvalConfig(target="org/T", head="h", out="elsewhere")
    record = record_of(config, [], [])
    file = tmp_path / "config.json"
    write_json(file, {**record, "config": SAVED[EvalConfig], "environment": {}})
    assert read_record(file, record)["config"] == SAVED[EvalConfig]


def test_a_training_run_of_an_earlier_version_goes_on():
    config = continued(TrainConfig(target="org/T", data="d.jsonl", out="out"), dict(SAVED[TrainConfig]))
    record = asdict(config) | {"contents": {}, "recipe": asdict(recipe_of(config))}
    assert list(changes(dict(SAVED[TrainConfig]), record)) == []


@pytest.mark.parametrize(
    ("kind", "earlier"),
    [
        ("eagle3", {"unrolled_steps": 7, "grow_at": 0.0}),
        ("medusa", {"weight_decay": 0.01, "warm_up": 2000, "decay": "linear", "beta2": 0.95, "accumulate": 1}),
        ("hydra++", {"weight_decay": 0.01, "dropout": 0.0, "last_rate": 0.0, "clip": 0.5}),
    ],
)
def test_a_run_of_an_earlier_version_goes_on_by_the_recipe_that_it_began_with(kind, earlier):
    before = SAVED[TrainConfig] | {"head": kind, "save_dtype": "auto", "unrolled_steps": None}
    config = continued(TrainConfig(target="org/T", data="d.jsonl", out="out", head=kind), before)
    assert {name: getattr(config, name) for name in earlier} == earlier
    record = asdict(config) | {"contents": {}, "recipe": asdict(recipe_of(config))}
    assert list(changes(before, record)) == []
    faster = replace(config, learning_rate=0.1)
    record = asdict(faster) | {"contents": {}, "recipe": asdict(recipe_of(faster))}
    assert [name for name, _ in changes(before, record)] == ["learning_rate"]
