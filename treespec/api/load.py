"""`load`: the public API's first call. Only here torch and transformers are imported."""

from dataclasses import fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from treespec.api.options import ModelOptions
from treespec.demo.known import default_drafter
from treespec.draft.drafters import DrafterSpec
from treespec.errors import InputError
from treespec.files.quiet import quiet
from treespec.model.placement import Placement

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from treespec.api.spec import Spec
    from treespec.model.placement import DeviceMap


def load(
    target: "str | PathLike[str] | PreTrainedModel",
    head: str | PathLike[str] | None = None,
    tree: str | None = None,
    verifier: str = "auto",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    drafter: str | None = None,
    allow_lossy: bool = False,
    template: str | None = None,
    device_map: "DeviceMap" = "auto",
    dtype: "str | torch.dtype" = "auto",
    max_memory: dict | None = None,
    trust_remote_code: bool = False,
    load_in: str | None = None,
    revision: str | None = None,
) -> "Spec":
    """Load a target and a source of drafts, placed by accelerate, for decoding only.

    target: directory, hub id, `demo`, or a loaded transformers model. A loaded model stays usable,
    but changes for good: evaluation mode, no gradients, attention that takes trees. Its weights do
    not change; those of a model loaded here are packed on a CPU, where that is faster.
    tokenizer: default the directory's own. A model object without one takes and gives token ids.
    head: directory or hub id of a trained head of any kind, or `demo` for treespec's own. drafter:
    `kind:value` instead of a head, with a kind of `treespec.draft.drafters.ROWS`. Default: for
    `demo` its head and a suffix cache of the sequence, for other targets one token at a time.
    tree: a form of `treespec.trees.policy.FORMS`. Default: the verifier's.
    verifier: a name of `treespec.verify.registry.NAMES`. allow_lossy: permit a lossy one.
    template: of chats, default the tokenizer's own. device_map, dtype, max_memory: as transformers
    takes them; repr(spec) names the dtype.
    trust_remote_code: run Python files from the target's or a draft model's directory.
    load_in: the form of the target's weights, one of `treespec.options.LOAD_IN_FORMS`. Default: as
    its files hold them, a quantised checkpoint included. revision: of the target's hub repository.
    Raises InputError, or TreeError, for models, names and files that cannot be used.
    """
    if head and drafter:
        raise InputError(f"both --head {head} and --drafter {drafter} are given: leave out one")
    with quiet():
        from treespec.api.loading import calibration_of, load_sources
        from treespec.api.spec import Spec

    if head is None and drafter is None:
        drafter = default_drafter(target)
    named = drafter or (f"head:{fspath(head)}" if head else None)
    tree = DrafterSpec.parse(named).tree_or(tree) if named else tree
    how = Placement(load_in, revision, trust_remote_code, dtype, device_map, max_memory)
    model, sources = load_sources(target, [named] if named else [], how, tokenizer)
    source = sources[named] if named else None
    calibration = calibration_of(source, named) if source and named else None
    return Spec(model, source, tree, verifier, template, allow_lossy, calibration)


def load_options(options: ModelOptions) -> "Spec":
    """`load` with the options that commands share. Raises as `load` does."""
    named: dict[str, Any] = {
        known.name: getattr(options, known.name) for known in fields(ModelOptions)
    }
    return load(**named)
