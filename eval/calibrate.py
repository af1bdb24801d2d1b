"""Calibration of a head on given text or on the target's own answers, saved beside the head."""

from collections.abc import Callable
from pathlib import Path

from treespec.draft.calibrate import Row, calibrate
from treespec.draft.calibration import FILE, save_calibration
from treespec.errors import InputError
from treespec.eval.acceptance_config import AcceptanceConfig
from treespec.eval.calibrate_config import CalibrateConfig
from treespec.eval.collect import content_of, texts_of
from treespec.eval.questions import load_questions
from treespec.eval.run import Step
from treespec.spec import load


def calibrate_head(config: CalibrateConfig, report: Callable[[Step], None] = lambda step: None) -> Path:
    """Returns the file written. Raises InputError for bad input."""
    if not Path(config.head).is_dir():
        raise InputError(f"--head {config.head} is no directory: its calibration is written there")
    if config.text:
        content_of(config.text)
    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load(config.target, config.head, template=config.template, device_map=config.device_map, dtype=config.dtype)
    questions = [] if config.text else load_questions(config.questions)[0][: config.limit]
    what = AcceptanceConfig(
        out=config.head,
        target=config.target,
        head=config.head,
        text=config.text,
        limit=config.limit,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        template=config.template,
    )
    rows: list[Row] = []
    for text in texts_of(what, spec, questions, report):
        features = spec.target.features(text.tokens[None])[0]
        rows.append((text.tokens.to(features.device), text.counts.to(features.device), features))
    report(Step(len(questions), len(questions), "calibrating"))
    assert spec.head
    save_calibration(calibrate(spec.head, spec.target, rows, config.depth, config.positions, config.seed), config.head)
    return Path(config.head) / FILE
