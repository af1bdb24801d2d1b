"""`treespec calibrate`: how likely the target accepts a head's drafts, for sampled trees."""

from treespec.cli.early import begin, check_questions, check_text
from treespec.cli.options import takes
from treespec.eval.config import CalibrateConfig


@takes(CalibrateConfig)
def calibrate(config: CalibrateConfig) -> None:
    """Fit the acceptance probabilities that --tree sampled uses. Training does so too."""
    check_text(config.text)
    check_questions(config.questions)
    begin(config, [f"head:{config.head}"])
    from treespec.cli.terminal import with_progress
    from treespec.eval.fit import calibrate_head

    file, coverage = with_progress(lambda report: calibrate_head(config, report))
    if coverage is not None:
        print(f"The head drafts {config.draft_vocab} tokens, which are {coverage:.1%} of the text")
    print(f"Calibration is in {file.resolve()}")
