"""Which verifier, tree and drafter go together. It checks names and small files, not weights.

A policy's own rules are those of `treespec.draft.fits`. This module must not load torch.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.draft.fits import DraftModel, check_fit
from treespec.errors import InputError
from treespec.heads.known import kind_of, levels_of
from treespec.heads.names import tensor_names
from treespec.options import AT_ONCE, GIVEN, HEADS, members_of
from treespec.trees.shape import Policy
from treespec.trees.static import chain
from treespec.verify.facts import SCHEMES, Facts, Known, is_paced, stands_for

if TYPE_CHECKING:
    from treespec.verify.scheme import Scheme
    from treespec.verify.walk import Verifier


def check_named(drafter: str, verifier: "Known | Verifier", tree: Policy | None) -> None:
    """Raises InputError for a verifier and tree that do not go with a drafter.

    drafter: `kind:value`, as `--drafter` takes it. tree: None is the verifier's own. A head that is
    missing or damaged passes: loading it raises the error.
    """
    check_joined(drafter)
    kind, _, value = members_of(drafter)[-1].partition(":")
    if has_given_tokens(drafter):
        check_given(kind, verifier, tree)
        return
    several = kind == "model" and "+" in value and not Path(value).exists()
    name = stands_for(verifier, several, tree)
    scheme = SCHEMES[name] if name else verifier.scheme
    check_pair(tree or chain(1), scheme, several)  # a default tree fits its verifier and the head
    if tree is not None:
        check_fit(tree, scheme, model_of(kind, value, several))


def has_given_tokens(drafter: str) -> bool:
    """Whether a drafter's tokens have no draft law, by its name. Joined to a draft model they need none."""
    return members_of(drafter)[-1].partition(":")[0] in GIVEN


def check_joined(drafter: str) -> None:
    """Raises InputError for `suffix+lookup` and the like: a memory is joined to a draft model."""
    _, *second = members_of(drafter)
    if second and has_given_tokens(drafter):
        name = second[0].partition(":")[0]
        raise InputError(
            f"--drafter {drafter}: {name} has no draft model to join: take suffix alone, or "
            "suffix+eagle:DIRECTORY"
        )


def model_of(kind: str, value: str, several: bool = False) -> DraftModel:
    """The draft model of `--drafter kind:value`, as far as its files and names tell."""
    if kind not in HEADS:
        return DraftModel(several=several)
    folder = Path(value).expanduser()
    known = kind if kind != "head" else kind_in(folder)
    at_once = known is None or known in AT_ONCE
    if not folder.is_dir():  # a hub id
        return DraftModel(trained=True, calibrated=True, at_once=at_once)
    calibrated = (folder / "calibration.json").exists()
    return DraftModel(trained=True, deepest=levels(folder), calibrated=calibrated, at_once=at_once)


def levels(folder: Path) -> int | None:
    """Levels that the head in a directory drafts; None: any number, or its files do not tell."""
    config, names = written(folder)
    return None if names is None else levels_of(config, names)


def check_kind(kind: str, head: str) -> None:
    """Raises InputError if `--drafter kind:head` names a directory with another kind of head."""
    actual = None if kind == "head" else kind_in(Path(head).expanduser())
    if actual and actual != kind:
        drafter = f"--drafter {kind}:{head}"
        raise InputError(f"{drafter} is a head of kind {actual}: write {actual}:{head}")


def kind_in(folder: Path) -> str | None:
    """The kind of the head in a directory; None where its files do not tell."""
    config, names = written(folder)
    return None if names is None else kind_of(config, names)


def written(folder: Path) -> tuple[dict[str, object], set[str] | None]:
    """A head's config.json and its tensors' names; ({}, None) where the files do not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}, None
    return (config, tensor_names(folder)) if isinstance(config, dict) else ({}, None)


def check_pair(policy: Policy, scheme: "Facts | Scheme", several: bool = False) -> None:
    """Raises InputError for a policy and scheme that go together with no draft model."""
    check_fit(policy, scheme, DraftModel(several=several, calibrated=True, at_once=True))


def check_given(name: str, verifier: "Known | Verifier", tree: object) -> None:
    """The pairing rule of drafters that hand over given tokens, which have no draft law.

    Raises InputError for a scheme that needs draft laws, and for a tree. It does so at temperature
    0 too, where all schemes agree.
    """
    if not (verifier.scheme.deterministic or is_paced(verifier)):
        raise InputError(
            f"{name} hands over given tokens, which have no draft law for verifier "
            f"{verifier.name}: take --verifier topk, or auto"
        )
    if tree is not None:
        raise InputError(
            f"{name} makes its own tree: leave out --tree, and see --drafter {name}:… for its "
            "options"
        )
