"""Ctrl-C and SIGTERM stop a run between two steps; the sentence that is printed says what the next run does."""

import signal
from dataclasses import replace

import pytest
from commands import interrupt_call, treespec
from training import checkpoint_of, folder_of, same_head, train_to_end, with_folder

from treespec.model.target import Target
from treespec.train.checkpoints import find_latest_step
from treespec.train.loop import steps as steps_module
from treespec.train.loop import stopping
from treespec.train.loop.stopping import describe_stopped_run
from treespec.train.run import train


def signal_at(step, number=signal.SIGINT, times=1):
    def after_step(done):
        if done == step:
            for _ in range(times):
                signal.raise_signal(number)

    return after_step


def train_until_stopped(config, after_step):
    with pytest.raises(KeyboardInterrupt):
        train(config, after_step)


@pytest.fixture(autouse=True)
def heeds_ctrl_c():
    """A process that a script starts in the background ignores Ctrl-C; these tests send it."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


def test_a_stopped_run_goes_on_from_the_step_that_was_finished(config, capfd):
    config = replace(config, checkpoint_every=4)
    whole = train_to_end(with_folder(config, "whole"))
    handler = signal.getsignal(signal.SIGTERM)
    train_until_stopped(config, signal_at(3))
    assert describe_stopped_run(config) == f"The same command goes on from step 3 of {config.out}"
    assert "\nStopping after this step, which is then saved" in capfd.readouterr().err
    train_until_stopped(config, signal_at(5, signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "going on from step 3\n" in capfd.readouterr().out
    train(config)
    assert "going on from step 5\n" in capfd.readouterr().out
    assert same_head(config, whole)


def test_a_stopped_run_goes_on_with_another_number_of_minutes(config, capsys):
    config = replace(config, max_steps=0, recipe=None, minutes=9.0)
    train_until_stopped(config, signal_at(1))
    train_until_stopped(replace(config, minutes=5.0), signal_at(2))
    assert "going on from step 1\n" in capsys.readouterr().out
    train_to_end(config, minutes=1e-6)
    assert "going on from step 2\n" in capsys.readouterr().out


def test_a_second_signal_stops_at_once_and_leaves_the_last_checkpoint(config, monkeypatch):
    train_until_stopped(config, signal_at(1, times=2))  # a launcher repeats the terminal's
    assert find_latest_step(folder_of(config)) == 1
    monkeypatch.setattr(stopping, "SAME_SIGNAL_SECONDS", -1.0)
    train_until_stopped(config, signal_at(3, times=2))
    assert describe_stopped_run(config) == f"The same command goes on from step 2 of {config.out}"
    assert not list(folder_of(config).glob("*.tmp"))


def test_a_signal_ends_a_validation_and_its_step_is_saved(config, monkeypatch):
    def validate(*_):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the validation went on")

    monkeypatch.setattr(steps_module, "look", validate)
    train_until_stopped(replace(config, validate_every=1), lambda step: None)
    assert checkpoint_of(config, 1).exists()


def test_ctrl_c_in_the_last_step_leaves_the_end_to_the_next_run(config):
    train_until_stopped(config, signal_at(6))
    assert not (folder_of(config) / "result.json").exists()
    assert train(config).positions


def test_before_the_first_step_the_sentence_says_what_is_kept(config, monkeypatch, capsys, tmp_path):
    config = replace(config, features=f"{tmp_path}/features")
    line = f"train --target {config.target} --data {config.data} --out {config.out} --features {config.features}"
    kept_features = f", and reads the features that are in {config.features}"
    for owner, name, kept in (
        (Target, "compute_features", ""),
        (steps_module, "run_optimizer_step", kept_features),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_call(getattr(owner, name), 1))
            assert treespec(f"{line} --batch-size 2 --max-steps 1 --mixed-precision no") == 130
        words = f"\nStopped. No step was saved: the same command begins at step 1{kept}\n"
        assert capsys.readouterr().err.endswith(words)
