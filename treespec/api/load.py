"""`load`: the first call of the public API. It reads a target and a source of drafts, for decoding only."""

from collections.abc import Sequence
from dataclasses import fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treespec.api.options import ModelOptions
from treespec.api.spec import Spec
from treespec.demo.known import NO_DRAFTER, choose_default_drafter, choose_head
from treespec.draft.calibration import Calibration, load_calibration
from treespec.draft.source import DraftSource, load_source
from treespec.draft.spec import DrafterSpec
from treespec.engine.synonyms import accept_synonyms
from treespec.errors import InputError
from treespec.files.locks import alone_with
from treespec.heads.folder import find_head_folder
from treespec.kernels.freed_memory import return_freed_memory
from treespec.model.adapters import unwrap_adapter
from treespec.model.cpu.direct_decoder import build_direct_decoder
from treespec.model.cpu.eight_bits import has_block_products, quantize_layers
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import has_bfloat16_instructions, pack
from treespec.model.placement import AS_IT_IS, Placement
from treespec.model.target import Target
from treespec.model.tree_check import warn_if_not_bit_exact

if TYPE_CHECKING:
    from treespec.model.placement import DeviceMap

# Device maps that place weights on accelerators if the machine has any.
SPREADING_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@accept_synonyms
def load(
    target: str | PathLike[str] | PreTrainedModel,
    head: str | PathLike[str] | None = None,
    tree: str | None = None,
    verifier: str = "auto",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: str | None = None,
    allow_lossy: bool = False,
    template: str | None = None,
    device_map: "DeviceMap" = "auto",
    dtype: str | torch.dtype = "auto",
    max_memory: dict | None = None,
    trust_remote_code: bool = False,
    load_in: str | None = None,
    revision: str | None = None,
) -> Spec:
    """Load a target and a source of drafts, placed by accelerate, for decoding only.

    Arguments may have other tools' names too, such as model, device and torch_dtype (`treespec.engine.synonyms`).

    Args:
        target: Directory, hub id, `demo`, or a loaded transformers model. A loaded model stays usable,
            but changes for good: evaluation mode, no gradients, attention that takes trees. Its
            weights do not change; those of a model loaded here are packed on a CPU if that is faster.
        head: Directory or hub id of a trained head of any kind, `auto` for the published head of the
            target (`treespec heads`), or `demo` for the one that comes with treespec. Default: see `drafter`.
        tree: A form of `treespec.trees.policy.TREE_SYNTAX`. Default: chosen for the verifier.
        verifier: A name of `treespec.verify.facts.VERIFIER_NAMES`. Default: `auto`.
        tokenizer: Default: the one in the target's directory. With a model object and no tokenizer,
            prompts and answers are token ids.
        drafter: `kind:value` instead of a head, with a kind of `treespec.draft.registry.DRAFTERS`.
            `none` decodes one token at a time. Default: `suffix:tokens=0`, which drafts from the
            sequence at hand; for `demo` its head as well.
        allow_lossy: Whether the verifier may change the distribution of the text.
        template: Chat template of fschat by name. Default: the tokenizer's own.
        device_map: As in transformers.
        dtype: As in transformers; repr(spec) names it.
        max_memory: As in transformers.
        trust_remote_code: Whether to run Python files from the target's or a draft model's directory.
        load_in: The form of the target's weights, one of `treespec.options.LOAD_IN_FORMS`. Default: as
            its files hold them, a quantised checkpoint included.
        revision: Of the target's hub repository. Default: its main branch.

    Raises:
        InputError: For models, names and files that cannot be used.
        TreeError: For a tree that the verifier or the drafter cannot use.
    """
    # 1. The drafter, and its tree.
    spec = parse_drafter(target, head, drafter)
    if spec is not None:
        tree = spec.choose_tree(tree)

    # 2. The target, and what drafts for it. The default drafter gives way if the target cannot score trees.
    placement = Placement(load_in, revision, trust_remote_code, dtype, device_map, max_memory)
    specs = []
    if spec is not None:
        specs.append(spec)
    is_default = head is None and drafter in (None, choose_default_drafter(target))
    needs_trees = spec is not None and not is_default
    model, sources = load_parsed(target, specs, placement, tokenizer, needs_trees)
    if spec is None or not sources:
        return Spec(model, None, tree, verifier, template, allow_lossy)
    (source,) = sources
    calibration = read_calibration(source, spec)
    return Spec(model, source, tree, verifier, template, allow_lossy, calibration)


def parse_drafter(
    target: str | PathLike[str] | PreTrainedModel,
    head: str | PathLike[str] | None,
    drafter: str | None,
) -> DrafterSpec | None:
    """Parse the drafter that `load`'s arguments name; None means one token at a time. Raises InputError."""
    if head and drafter:
        raise InputError(f"both --head {head} and --drafter {drafter} are given: leave out one")
    if head:
        return DrafterSpec.parse(f"head:{choose_head(target, fspath(head))}")
    if not drafter:
        drafter = choose_default_drafter(target)
    if drafter == NO_DRAFTER:
        return None
    return DrafterSpec.parse(drafter)


def load_options(options: ModelOptions) -> Spec:
    """Call `load` with the options that commands share. Raises what `load` raises."""
    return load(**{field.name: getattr(options, field.name) for field in fields(ModelOptions)})


def load_sources(
    target: str | PathLike[str] | PreTrainedModel,
    drafters: Sequence[str],
    placement: Placement = AS_IT_IS,
) -> tuple[Target, dict[str, DraftSource]]:
    """Load a target and several sources of drafts for it. Returns the target, and each source by its name.

    drafters: `kind:value` each, as for `--drafter`. placement: where the weights go, and in which form.
    """
    specs = [DrafterSpec.parse(name) for name in drafters]
    model, sources = load_parsed(target, specs, placement)
    return model, dict(zip(drafters, sources, strict=True))


def load_parsed(
    target: str | PathLike[str] | PreTrainedModel,
    drafters: Sequence[DrafterSpec],
    placement: Placement,
    tokenizer: PreTrainedTokenizerBase | None = None,
    needs_trees: bool = True,
) -> tuple[Target, list[DraftSource]]:
    """Load a target, and the source of drafts for each parsed drafter. target, tokenizer: as for `load`.

    needs_trees: whether to refuse a target whose trees fail their check. With False it gets no source then.
    """
    # 1. The target.
    target = unwrap_adapter(target)
    if isinstance(target, PreTrainedModel):
        refuse_placement(placement)
        with alone_with([target]):
            model = Target(target, tokenizer, needs_trees=needs_trees)
    elif isinstance(target, str | PathLike):
        model = read_target(fspath(target), placement, needs_trees)
        if tokenizer is not None:
            model.tokenizer = tokenizer
    else:
        raise InputError(
            f"the target is a {type(target).__name__}: give a directory, a hub id or a loaded model"
        )

    # 2. Sources are loaded first: they copy weights of the target, which packing would change.
    sources = []
    if not model.tree_obstacle:
        sources = [load_source(spec, model) for spec in drafters]
    if model.model is not target:  # the weights of the caller's model do not change
        pack(model.model)
        decoder = model.tree_decoder
        decoder.direct = build_direct_decoder(decoder.decoder, fuse(model.model))
    is_rounded = has_block_products(model.model)
    for source in sources:
        for module in source.models:
            if is_rounded:
                quantize_layers(module)
            pack(module)
            fuse(module)
    return_freed_memory()
    if sources:
        warn_if_not_bit_exact(model)
    return model, sources


def read_target(path: str, placement: Placement, needs_trees: bool = True) -> Target:
    """Load a target from its directory or hub id. needs_trees: as for `Target`.

    On a CPU without bfloat16 instructions, quantised weights are read with dtype float32, because
    products in float32 are faster there. Those of `q8` and `q4` are as fast in any dtype.
    """
    is_slow = is_only_cpu(placement.device_map) and not has_bfloat16_instructions()
    if placement.is_rounded_here:
        return Target.load(path, placement, needs_trees)
    if is_slow and placement.load_in and placement.dtype == "auto":
        placement = replace(placement, dtype="float32")
    return Target.load(path, placement, needs_trees)


def is_only_cpu(device_map: Any) -> bool:
    """Whether accelerate places every weight on the CPU."""
    if isinstance(device_map, dict):
        return {str(device) for device in device_map.values()} == {"cpu"}
    if device_map is None or str(device_map) in SPREADING_MAPS:
        return not torch.accelerator.is_available()
    return str(device_map) == "cpu"


def refuse_placement(placement: Placement) -> None:
    """Refuse placement options for a model that is loaded already. Raises InputError."""
    for name, value in vars(placement).items():
        if value not in (None, "auto") and name != "trust_remote_code":
            raise InputError(f"{name} is {value}, but the target is loaded already: leave it out")


def load_calibration_for(source: DraftSource, drafter: str) -> Calibration | None:
    """Load the calibration of a source's trained head. drafter: `kind:value`, the name of the source."""
    return read_calibration(source, DrafterSpec.parse(drafter))


def read_calibration(source: DraftSource, drafter: DrafterSpec) -> Calibration | None:
    """Load the calibration in the folder of a source's trained head; None without a head or a calibration."""
    if not source.head:
        return None
    return load_calibration(find_head_folder(drafter.place))
