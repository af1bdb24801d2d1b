"""Load the source of drafts that `--drafter kind:value` names."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from torch import nn

from treespec.draft.drafter import Drafter
from treespec.draft.joint import Joint
from treespec.draft.model_free.kinds import GIVEN, given_by, suffix
from treespec.draft.models.model import ModelProposer, draft_model
from treespec.draft.models.other_vocabulary import OtherVocabulary
from treespec.draft.models.several import SeveralModels
from treespec.draft.models.skip import skipped_target
from treespec.draft.models.sparse import sparse_target
from treespec.draft.pairing import check_joined
from treespec.draft.proposer import Proposer
from treespec.draft.trained.eagle import embedding_of, embedding_to_share
from treespec.draft.trained.kinds import KINDS
from treespec.draft.trained.mtp_load import mtp_of_target
from treespec.draft.trained.other_tokens import in_target_tokens
from treespec.draft.trained.trained_tokens import check_tokens
from treespec.draft.vocabulary import load_vocabulary, restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.head import Head
from treespec.heads.names import head_folder
from treespec.model.target import Target
from treespec.options import members_of, nearest


def trained_head(folder: str, target: Target) -> Head:
    """A head of any kind with its draft vocabulary, before its target is packed.

    Raises HeadError.
    """
    path = head_folder(folder)
    head = load_head(path, target.dtype, target.output_device)
    if head.vocab_size != target.vocab_size:
        head = in_target_tokens(head, path, target, folder)
    fit(head, target, folder)
    if (tokens := load_vocabulary(path, target.vocab_size)) is not None:
        restrict(head, target, tokens)
    return head


def head_of_kind(kind: str) -> Callable[[str, Target], Head]:
    """`trained_head` that refuses heads of another kind."""

    def source(folder: str, target: Target) -> Head:
        head = trained_head(folder, target)
        if head.kind != kind:
            raise InputError(
                f"--drafter {kind}:{folder} is a head of kind {head.kind}: write "
                f"{head.kind}:{folder}"
            )
        return head

    return source


def draft_models(paths: str, target: Target) -> ModelProposer | OtherVocabulary | SeveralModels:
    """Draft models by directory or hub id, several of them joined by +. Raises InputError."""
    names = [paths] if Path(paths).exists() else paths.split("+")
    models = [draft_model(name, target) for name in names]
    same = [model for model in models if isinstance(model, ModelProposer)]
    if len(models) > 1 and len(same) < len(models):
        raise InputError(
            f"--drafter model:{paths}: several draft models must have the target's tokens; a model of "
            "another vocabulary drafts alone"
        )
    return models[0] if len(models) == 1 else SeveralModels(same)


HEADS = ("head", *KINDS)  # kinds of drafters that name a trained head's directory
# (value, target) -> a trained head, a proposer or a drafter
SOURCES: dict[str, Callable[[str, Target], Head | Proposer | Drafter]] = {
    "head": trained_head,
    "model": draft_models,
    "mtp": mtp_of_target,
    "self": skipped_target,
    "sparse": sparse_target,
    **{kind: head_of_kind(kind) for kind in KINDS},
    **{name: given_by(name) for name in GIVEN},
}


def source_of(drafter: str, target: Target) -> Head | Proposer | Drafter | Joint:
    """Load what `kind:value` names, or `suffix+kind:value`.

    Raises InputError for an unknown kind, and whatever loading raises.
    """
    first, *second = members_of(drafter)
    if second:
        check_joined(drafter)
        name, _, value = second[0].partition(":")
        own = SOURCES[name](value, target)
        return Joint(suffix(first.partition(":")[2], target), cast("Head | Proposer", own))
    kind, _, value = first.partition(":")
    if kind not in SOURCES:
        hint = nearest(kind, SOURCES)
        choice = ", ".join(SOURCES)
        raise InputError(
            f"unknown drafter {drafter!r}{hint}: choose {choice}, as in eagle:DIRECTORY or lookup"
        )
    return SOURCES[kind](value, target)


def fit(head: Head, target: Target, name: str) -> None:
    """Check that a head belongs to a target, and share the embedding if both hold the same.

    Raises InputError for the head of another target.
    """
    head.settle_taps(target.layers)
    if beyond := [k for k in head.taps if not 0 <= k < target.layers]:
        raise InputError(
            f"head {name} taps layer {beyond[0]}, the target has {target.layers}: it is for "
            "another target"
        )
    width = len(head.taps) * target.config.hidden_size or target.feature_width
    if head.feature_size != width:
        raise InputError(
            f"head {name} is for features of width {head.feature_size}, the target's are {width}"
        )
    if head.vocab_size != target.vocab_size:
        raise InputError(
            f"head {name} is for a vocabulary of {head.vocab_size}, the target's is "
            f"{target.vocab_size}"
        )
    check_tokens(head, target, name)
    if head.lacks_embedding:
        head.share_embedding(embedding_for(head, target, name))
    head.share_embedding(embedding_to_share(target))


def embedding_for(head: Head, target: Target, name: str) -> nn.Parameter | nn.Module:
    """The target's embedding on its output device, for a head that came without one.

    A quantised one is the target's own module, where the device is the same and it scales nothing.
    Raises InputError.
    """
    width = target.model.get_input_embeddings().embedding_dim
    if width != head.hidden_size:
        raise InputError(
            f"head {name} lacks embed_tokens.weight, and the target's embedding is {width} wide, "
            f"not {head.hidden_size}"
        )
    own = embedding_to_share(target)
    here = target.device == target.output_device
    if isinstance(own, nn.Module) and here and not hasattr(own, "embed_scale"):
        return own
    return nn.Parameter(embedding_of(target).to(target.output_device), requires_grad=False)
