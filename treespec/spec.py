"""The public API: `load` a target and a head, `generate` and `stream`."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from treespec import templates
from treespec.decode import Decoder, Piece
from treespec.draft.calibration import Calibration, load_calibration
from treespec.draft.eagle import EagleProposer
from treespec.draft.grow import TreeDrafter
from treespec.draft.times import Times, times_for
from treespec.draft.vocabulary import load_vocabulary, restrict
from treespec.ending import Ending
from treespec.errors import InputError
from treespec.heads.checkpoint import head_folder, load_head
from treespec.heads.eagle import EagleHead
from treespec.packed import pack
from treespec.sampling import SamplingParams
from treespec.stats import Stats
from treespec.target import Target
from treespec.trees.auto import AutoTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy, policy
from treespec.trees.static import balanced, chain, eagle
from treespec.verify.is_lp import IsLp
from treespec.verify.scheme import Scheme
from treespec.verify.verifiers import verifier_by_name
from treespec.verify.walk import Verifier

Prompt = str | Sequence[int] | Sequence[dict[str, str]] | torch.Tensor


@dataclass(frozen=True)
class Output:
    """text: without special tokens and stop strings. token_ids: the new ones, the end-of-sequence included."""

    text: str
    token_ids: list[int]
    stats: Stats


@final
class Stream:
    """Iterate over the pieces of an answer; `output` is what there is so far."""

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        self._pieces, self._stats = pieces, stats
        self._seen: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self._seen.append(piece)
            yield piece

    @property
    def output(self) -> Output:
        ids = [token for piece in self._seen for token in piece.token_ids]
        return Output("".join(piece.text for piece in self._seen), ids, self._stats)


@final
class Spec:
    """A target with a draft head, a tree policy and a verifier; without a head, the baseline."""

    def __init__(
        self,
        target: Target,
        head: EagleHead | None,
        tree: str | Policy | None = None,
        verifier: str | Verifier = "topk",
        template: str | None = None,
        allow_lossy: bool = False,
        calibration: Calibration | None = None,
        times: Times | None = None,
    ) -> None:
        self.target, self.head, self.template, self.calibration = target, head, template, calibration
        self.verifier = verifier_by_name(verifier, allow_lossy) if isinstance(verifier, str) else verifier
        scheme = self.verifier.scheme
        if tree is None:
            tree = default_tree(scheme)
        self.policy = policy(tree) if isinstance(tree, str) else tree
        self.times = times
        drafter = None
        if head:
            if isinstance(self.policy, AutoTree) and not times:
                self.times = times_for(target, head)
            drafter = TreeDrafter(EagleProposer(head, target), self.policy, scheme, calibration, self.times)
        self.decoder = Decoder(target, drafter, self.verifier)

    def configured(
        self, tree: str | Policy | None = None, verifier: str | Verifier = "topk", allow_lossy: bool = False
    ) -> "Spec":
        """The same target and head with another tree and verifier; no weights are copied."""
        spec = Spec(self.target, self.head, tree, verifier, self.template, allow_lossy, self.calibration, self.times)
        self.times = spec.times
        return spec

    def baseline(self) -> "Spec":
        """One token at a time through the same target and cache: what every speedup is measured against."""
        return Spec(self.target, None, template=self.template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Text, messages (by the chat template) or token ids -> token ids. Raises InputError if empty."""
        given: Any = prompt.flatten().tolist() if isinstance(prompt, torch.Tensor) else prompt
        if self.target.tokenizer is None and not all(isinstance(token, int) for token in given):
            raise InputError("the target has no tokenizer: give token ids")
        if isinstance(given, str):
            ids = self.target.tokenizer.encode(given) if given else []
        elif given and isinstance(given[0], dict):
            ids = templates.encode(self.target.tokenizer, given, self.template)
        else:
            ids = [int(token) for token in given]
        if not ids:
            raise InputError("the prompt is empty: give text, messages or token ids")
        if bad := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise InputError(f"token id {bad[0]} is outside the vocabulary of {self.target.vocab_size}")
        return ids

    def stream(
        self,
        prompt: Prompt,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Stream:
        """Pieces of the answer as they are accepted. Same seed, same text. Raises InputError for bad input."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, must be at least 1")
        params = SamplingParams(temperature, top_k, top_p, min_p)
        ids = self.encode(prompt)
        room = self.target.context_length - len(ids)
        own = templates.stops(self.template)
        stop = (stop,) if isinstance(stop, str) else stop
        ending = Ending(
            self.target.tokenizer,
            self.target.eos | set(own.token_ids),
            (*stop, *own.strings),
            min(max_new_tokens, room),
        )
        generator = torch.Generator(device=self.target.output_device)
        generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        stats = Stats()
        return Stream(self.decoder.run(ids, params, ending, generator, stats), stats)

    def generate(self, prompt: Prompt, **options: Any) -> Output:
        """The whole answer; options as for `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.output


def default_tree(scheme: Scheme) -> Policy:
    """EAGLE-2's dynamic tree where the children are deterministic, else as much of EAGLE-1's as the scheme takes.

    `is-lp` accepts either of two draws as readily, so that both have to go deep.
    """
    if scheme.deterministic:
        return DynamicTree()
    if isinstance(scheme, IsLp):
        return balanced(2, 3)
    if scheme.max_draws == 1:
        return chain(5)
    return eagle().narrowed(scheme.max_draws) if scheme.max_draws else eagle()


def load(
    target: str,
    head: str | None = None,
    tree: str | None = None,
    verifier: str = "topk",
    *,
    allow_lossy: bool = False,
    template: str | None = None,
    device_map: Any = "auto",
    dtype: str | torch.dtype = "auto",
    max_memory: dict | None = None,
) -> Spec:
    """Load a target (directory or hub id) and a head for it, placed by accelerate, to decode and not to train.

    tree: a name of `treespec.trees.policy.FORMS`; None is the scheme's default. verifier: a name of
    `treespec.verify.verifiers.NAMES`; a lossy one needs allow_lossy. Raises InputError, or HeadError and TreeError,
    for what cannot be used.
    """
    model = Target.load(target, device_map=device_map, dtype=dtype, max_memory=max_memory)
    folder = head_folder(head) if head else None
    trained = load_head(folder, model.dtype, model.output_device) if folder else None
    if folder and trained:
        fit(trained, model, head)
        if (tokens := load_vocabulary(folder, model.vocab_size)) is not None:
            restrict(trained, model, tokens)
        pack(trained)
    pack(model.model)
    return Spec(model, trained, tree, verifier, template, allow_lossy, load_calibration(folder) if folder else None)


def fit(head: EagleHead, target: Target, name: str | None) -> None:
    """Check that a head belongs to a target, and share the embedding where they hold the same one."""
    width = target.feature_width
    if head.hidden_size != width:
        raise InputError(f"head {name} is for features of width {head.hidden_size}, the target's are {width}")
    if head.vocab_size != target.vocab_size:
        raise InputError(f"head {name} is for a vocabulary of {head.vocab_size}, the target's is {target.vocab_size}")
    own = target.model.get_input_embeddings().weight
    if own.device == head.embed_tokens.weight.device and torch.equal(own, head.embed_tokens.weight):
        head.embed_tokens.weight = own
