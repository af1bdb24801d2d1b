"""Calibration of a head on given text or on the target's own answers, and its draft vocabulary, saved beside it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from treespec.draft.calibration import FILE, save_calibration
from treespec.draft.fit.calibrate import Row, calibrate
from treespec.draft.vocabulary import most_frequent, save_vocabulary
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.fit.calibrate_config import CalibrateConfig
from treespec.eval.questions import load_questions
from treespec.eval.texts import content_of, texts_of
from treespec.files import check_writable
from treespec.spec import Spec, load


def calibrate_head(
    config: CalibrateConfig, report: Callable[[Step], None] = lambda step: None
) -> tuple[Path, float | None]:
    """Returns the file written, and the coverage of a draft vocabulary if one was made. Raises InputError."""
    if not Path(config.head).is_dir():
        raise InputError(f"--head {config.head} is no directory: its calibration is written there")
    check_writable(Path(config.head) / FILE)
    if config.text:
        content_of(config.text)
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
    coverage = None
    if config.draft_vocab:
        spec = loaded(config, None, report)
        counted = [
            text.tokens[text.counts]
            for text in texts_of(replace(what, limit=None), spec, [], report)
        ]
        tokens, coverage = most_frequent(counted, config.draft_vocab, spec.target)
        save_vocabulary(tokens, coverage, config.head)
    spec = loaded(
        config, config.head, report
    )  # with that vocabulary, whose rows it takes before it is packed
    assert spec.head
    rows: list[Row] = []
    for text in texts_of(what, spec, questions, report):
        features = spec.target.features(text.tokens[None], spec.head.taps, last=True)[0]
        rows.append((text.tokens.to(features.device), text.counts.to(features.device), features))
    report(Step(len(questions), len(questions), "calibrating"))
    save_calibration(
        calibrate(spec.head, spec.target, rows, config.depth, config.positions, config.seed),
        config.head,
    )
    return Path(config.head) / FILE, coverage


def loaded(config: CalibrateConfig, head: str | None, report: Callable[[Step], None]) -> Spec:
    report(Step(0, 1, f"loading {config.target}" + (f" and {head}" if head else "")))
    return load(
        config.target,
        head,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
