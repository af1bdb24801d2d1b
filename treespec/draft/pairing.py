"""Which verifier, tree and drafter go together. It checks names and small files, not weights.

A policy's own rules are those of `treespec.draft.fits`. This module must not load torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from treespec.draft.drafters import DRAFTERS, DrafterSpec
from treespec.draft.fits import DraftModel, check_fit
from treespec.errors import InputError
from treespec.heads.known import kind_in, levels_in
from treespec.trees.shape import Policy
from treespec.trees.static import chain
from treespec.verify.facts import SCHEMES, Facts, Known, is_paced, stands_for

if TYPE_CHECKING:
    from treespec.verify.scheme import Scheme
    from treespec.verify.walk import Verifier


def check_named(spec: DrafterSpec, verifier: "Known | Verifier", tree: Policy | None) -> None:
    """Raises InputError for a verifier and tree that do not go with a drafter.

    tree: None is the verifier's own. A head that is missing or damaged passes: loading it raises
    the error.
    """
    if spec.kind.one_hot:
        check_one_hot(spec.kind.name, verifier, tree)
        return
    several = len(spec.models) > 1
    name = stands_for(verifier, several, tree)
    scheme = SCHEMES[name] if name else verifier.scheme
    check_pair(tree or chain(1), scheme, several)  # a default tree fits its verifier and the head
    if tree is not None:
        check_fit(tree, scheme, model_of(spec))


def model_of(spec: DrafterSpec) -> DraftModel:
    """The draft model that a drafter names, as far as its files and names tell."""
    if not spec.kind.is_head:
        return DraftModel(several=len(spec.models) > 1)
    folder = Path(spec.place).expanduser()
    kind = kind_in(folder) if spec.kind.name == "head" else spec.kind.name
    at_once = kind is None or DRAFTERS[kind].at_once
    if not folder.is_dir():  # a hub id
        return DraftModel(trained=True, calibrated=True, at_once=at_once)
    calibrated = (folder / "calibration.json").exists()
    return DraftModel(
        trained=True, deepest=levels_in(folder), calibrated=calibrated, at_once=at_once
    )


def check_pair(policy: Policy, scheme: "Facts | Scheme", several: bool = False) -> None:
    """Raises InputError for a policy and scheme that go together with no draft model."""
    check_fit(policy, scheme, DraftModel(several=several, calibrated=True, at_once=True))


def check_one_hot(name: str, verifier: "Known | Verifier", tree: object) -> None:
    """The pairing rule of drafters whose tokens have no draft distribution.

    Raises InputError for a scheme that needs one, and for a tree. It does so at temperature 0 too,
    where all schemes agree.
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
