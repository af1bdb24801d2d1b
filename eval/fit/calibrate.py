"""A head's calibration, and a draft vocabulary if one is asked for, kept beside the head."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from treespec.draft.calibration import FILE, save_calibration
from treespec.draft.fit.calibrate import calibrate
from treespec.draft.vocabulary import most_frequent, save_vocabulary
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.fit.calibrate_config import CalibrateConfig
from treespec.eval.fit.features import rows_of
from treespec.eval.loading import load_models
from treespec.eval.questions import load_questions
from treespec.eval.texts import passages_of
from treespec.files.atomic import check_writable
from treespec.text.plain import content_of


def calibrate_head(
    config: CalibrateConfig, report: Callable[[Step], None] = lambda step: None
) -> tuple[Path, float | None]:
    """Write HEAD/calibration.json; returns its path and the coverage of a new draft vocabulary.

    The text is that of `--text`, or without it the target's own answers. Raises InputError for a
    head that is no directory, and for text that cannot be read or is too short.
    """
    # 1. Files and questions, before a model is loaded.
    file = Path(config.head) / FILE
    if not file.parent.is_dir():
        raise InputError(f"--head {config.head} is no directory: its calibration is written there")
    check_writable(file)
    if config.text:
        content_of(config.text)
    questions = [] if config.text else load_questions(config.questions)[0][: config.limit]
    text = AcceptanceConfig(
        out=config.head,
        target=config.target,
        head=config.head,
        text=config.text,
        limit=config.limit,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        template=config.template,
    )

    # 2. The draft vocabulary. It comes first: the head takes its rows when it is loaded.
    coverage = None
    if config.draft_vocab:
        report(Step(0, 1, f"loading {config.target}"))
        spec = load_models(config, None)
        passages = passages_of(replace(text, limit=None), spec, [], report)
        counted = [passage.tokens[passage.counts] for passage in passages]
        tokens, coverage = most_frequent(counted, config.draft_vocab, spec.target)
        save_vocabulary(tokens, coverage, config.head)

    # 3. The calibration.
    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load_models(config, config.head)
    assert spec.head
    rows = list(rows_of(text, spec, questions, report))
    report(Step(len(questions), len(questions), "calibrating"))
    fitted = calibrate(spec.head, spec.target, rows, config.depth, config.positions, config.seed)
    save_calibration(fitted, config.head)
    return file, coverage
