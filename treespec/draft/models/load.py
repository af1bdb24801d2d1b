"""`--drafter model:PATH`: load draft models, and compare their tokens with the target's."""

import logging

from treespec.draft.drafter import Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.model import ModelProposer, SeveralModels
from treespec.draft.models.other_vocabulary import OtherVocabulary, shared_vocabulary
from treespec.errors import InputError
from treespec.model.target import Target

log = logging.getLogger(__name__)


def load_models(spec: DrafterSpec, target: Target) -> Proposer:
    """Draft models by directory or hub id, in the target's dtype on its output device.

    Raises InputError for one that does not fit, and for several where one has another vocabulary.
    """
    models = [draft_model(name, target) for name in spec.models]
    if len(models) == 1:
        return models[0]
    if any(model.vocabulary is not None for model in models):
        raise InputError(
            f"--drafter {spec.own}: several draft models must have the target's tokens; a model of "
            "another vocabulary drafts alone"
        )
    return SeveralModels(models)


def draft_model(path: str, target: Target) -> ModelProposer:
    """The proposer of one draft model.

    One of another vocabulary drafts what it shares with the target's; that share is logged.
    Raises InputError if it does not fit.
    """
    model = loaded_model(path, target)
    difference = tokens_differ(model, target)
    if difference is None:
        return ModelProposer(model, target)
    if model.tokenizer is None or target.tokenizer is None:
        raise InputError(
            f"--drafter model:{path} has other tokens than the target ({difference}): take a model "
            "of its family"
        )
    sizes = target.vocab_size, model.vocab_size
    try:
        words = shared_vocabulary(target.tokenizer, model.tokenizer, *sizes)
    except InputError as error:
        raise InputError(
            f"--drafter model:{path} cannot draft for this target: {error}; take another model"
        ) from None
    log.warning(
        "draft model %s has another vocabulary: it drafts the %d tokens that both have, %.0f %% of "
        "the target's",
        path,
        len(words.target),
        100 * words.share,
    )
    return OtherVocabulary(model, target, words)


def loaded_model(path: str, target: Target) -> Target:
    """A draft model beside its target. Raises InputError where it cannot be loaded."""
    place = target.output_device
    try:
        return Target.load(
            path,
            dtype=target.dtype,
            device_map=None if place.type == "cpu" else {"": place},
            trust_remote_code=target.trust_remote_code,
        )
    except InputError as error:
        raise InputError(
            f"--drafter model:{path}: {str(error).replace('the target', 'the draft model')}"
        ) from error


def tokens_differ(model: Target, target: Target) -> str | None:
    """A difference between two models' numbering of tokens, or None if they agree.

    A number that only one of them names is padding of the other's embedding, and no difference.
    """
    if model.tokenizer is None or target.tokenizer is None:
        same = model.vocab_size == target.vocab_size and model.tokenizer is target.tokenizer
        sizes = f"{model.vocab_size} and {target.vocab_size}"
        return None if same else f"{sizes}, without a tokenizer to compare"
    theirs = {number: token for token, number in model.tokenizer.get_vocab().items()}
    ours = {number: token for token, number in target.tokenizer.get_vocab().items()}
    for number in sorted(theirs.keys() & ours.keys()):
        if theirs[number] != ours[number]:
            return f"token {number} is {theirs[number]!r}, the target's {ours[number]!r}"
    return None
