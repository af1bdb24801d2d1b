"""Checks before the target is loaded: options of the kind of head, trackers, folders."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from treespec.errors import InputError
from treespec.files.atomic import check_folder
from treespec.heads.registry import TRAINING
from treespec.text import templates
from treespec.train.config import TrainConfig


def check(config: TrainConfig) -> None:
    """Raises InputError for options that cannot be used with any target and data."""
    # 1. Names.
    for option in fields(config):
        able = [kind for kind, training in TRAINING.items() if option.name in training.options]
        if able and config.head not in able and getattr(config, option.name) != option.default:
            no = "no-" if option.default is True else ""
            raise InputError(
                f"--{no}{option.name.replace('_', '-')} is for --head {', '.join(able)}: leave it "
                f"out for {config.head}"
            )
    if (name := config.tracker) is not None:
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(map(find_spec, packages)):
            package = name.replace("_", "-")
            raise InputError(f"--tracker {name} needs its package: pip install {package}")
    if config.from_head is not None and config.first_weights != "random":
        raise InputError("--from-head brings first weights: leave --first-weights out")
    if config.feature_dtype != "auto" and config.features is None:
        raise InputError("--feature-dtype is of stored features: name their folder with --features")
    if config.patience and not config.validate_every:
        raise InputError(
            f"--patience {config.patience} needs --validate-every: it counts validations"
        )
    templates.stops(config.template)  # raises for a name that fschat does not know

    # 2. Folders.
    check_folder(config.out)
    if config.features is not None:
        check_folder(config.features, option="--features")
    out = Path(config.out)
    if (out / "model.safetensors").exists() and not (out / "training").exists():
        raise InputError(
            f"--out {out} holds a model that was not trained there: name another folder"
        )
