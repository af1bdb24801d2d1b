"""The public API: `load` a target and a head, `generate` and `stream`."""

import secrets
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast, final, overload

import torch

from treespec import templates
from treespec.decode import Decoder, Piece, Text
from treespec.default_tree import default_tree
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Drafter
from treespec.draft.given import GivenDrafter, check_given
from treespec.draft.grow import TreeDrafter, check_pair
from treespec.draft.kinds import KINDS
from treespec.draft.proposer import Proposer
from treespec.draft.times import Times, times_for
from treespec.ending import Ending
from treespec.errors import InputError
from treespec.loading import calibration_of, load_sources
from treespec.prompts import Prompt, Prompts, encode
from treespec.sampling import SamplingParams
from treespec.stats import Stats
from treespec.stream import Output, Stream, output_of
from treespec.target import Target
from treespec.trees.auto import AutoTree
from treespec.trees.policy import Policy, policy
from treespec.verify.verifiers import verifier_by_name
from treespec.verify.walk import Verifier


@final
class Spec:
    """A target with what drafts for it, a tree policy and a verifier; without a drafter, the baseline.

    source: a trained head, a proposer or a drafter. A drafter that hands over whole trees takes no policy.
    """

    def __init__(
        self,
        target: Target,
        source: Any,
        tree: str | Policy | None = None,
        verifier: str | Verifier = "topk",
        template: str | None = None,
        allow_lossy: bool = False,
        calibration: Calibration | None = None,
        times: Times | Callable[[], Times] | None = None,
    ) -> None:
        if kind := KINDS.get(getattr(source, "kind", "")):
            source = kind.proposer(source, target)
        self.target, self.source, self.template, self.calibration = target, source, template, calibration
        self.verifier = verifier_by_name(verifier, allow_lossy) if isinstance(verifier, str) else verifier
        scheme = self.verifier.scheme
        if isinstance(source, GivenDrafter):
            check_given(source.name, scheme, tree)
        elif tree is None:
            tree = default_tree(scheme, self.proposer, calibration)
        self.policy = policy(tree) if isinstance(tree, str) else tree
        self.times = (lambda: times) if isinstance(times, Times) else times
        drafter: Drafter | None = None
        if self.proposer and self.policy:
            check_pair(self.policy, scheme, self.proposer)
            self.times = self.times or cache(partial(times_for, target, self.proposer))
            drafter = TreeDrafter(self.proposer.new(), self.policy, scheme, calibration, self.times)
        elif source:
            drafter = source.new()
        self.decoder = Decoder(target, drafter, self.verifier)

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if there is one."""
        return self.source if hasattr(self.source, "extend") else None

    @property
    def head(self) -> Any:
        """The trained head, if there is one."""
        return getattr(self.source, "head", None)

    def configured(
        self, tree: str | Policy | None = None, verifier: str | Verifier = "topk", allow_lossy: bool = False
    ) -> "Spec":
        """The same target and head with another tree and verifier; no weights are copied."""
        return Spec(self.target, self.source, tree, verifier, self.template, allow_lossy, self.calibration, self.times)

    def baseline(self) -> "Spec":
        """One token at a time through the same target and cache: what every speedup is measured against."""
        return Spec(self.target, None, template=self.template)

    def warm_up(self) -> None:
        """Decode a few tokens, so that what is compiled or measured at first is there."""
        self.generate([0] * 8, max_new_tokens=8)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, by `treespec.prompts.encode`. Raises InputError."""
        return encode(self.target, prompt, self.template)

    def request(
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
    ) -> tuple[Text, SamplingParams]:
        """What the decoder is asked for; same seed, same answer. Raises InputError for bad input."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, must be at least 1")
        params = SamplingParams(temperature, top_k, top_p, min_p)
        if isinstance(self.policy, AutoTree) and self.times:
            self.times()  # measured here, where nothing is timed
        ids = self.encode(prompt)
        room = self.target.context_length - len(ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the target's context holds {self.target.context_length}: "
                "shorten the prompt"
            )
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
        return Text(ids, ending, generator, Stats()), params

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Pieces of the answer as they are accepted; options as for `request`."""
        text, params = self.request(prompt, **options)
        return Stream((piece for _, piece in self.decoder.run([text], params)), text.stats)

    @overload
    def generate(self, prompt: Prompts, **options: Any) -> list[Output]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Output: ...
    def generate(self, prompt: Prompt | Prompts, **options: Any) -> Output | list[Output]:
        """The whole answer; options as for `request`. A list of prompts is answered together: see `generate_all`."""
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
        if several and isinstance(prompt[0], Sequence | torch.Tensor):
            return self.generate_all(cast(Prompts, prompt), **options)
        stream = self.stream(cast(Prompt, prompt), **options)
        for _ in stream:
            pass
        return stream.output

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int | None = None,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[Output]:
        """The answers to prompts, of which the target takes several in one forward.

        batch: prompts at a time, by default all; the place of one that is answered is taken by the next. seed: of the
        first prompt, the next prompt having the next seed, or one for each. An answer is the one that its prompt
        alone would have with that seed, but for rounding. Raises InputError for bad input, with the prompt's number.
        """
        if batch is not None and batch < 1:
            raise InputError(f"batch is {batch}, must be at least 1")
        texts = []
        for i, prompt in enumerate(prompts):
            own = seed[i] if isinstance(seed, Sequence) else None if seed is None else seed + i
            try:
                text, params = self.request(prompt, seed=own, **options)
            except InputError as error:
                raise InputError(f"prompt {i + 1} of {len(prompts)}: {error}") from None
            texts.append(text)
        pieces: dict[Text, list[Piece]] = {text: [] for text in texts}
        for text, piece in self.decoder.run(texts, params, batch or len(texts)) if texts else ():
            pieces[text].append(piece)
        return [output_of(pieces[text], text.stats) for text in texts]


def load(
    target: str,
    head: str | None = None,
    tree: str | None = None,
    verifier: str = "topk",
    *,
    drafter: str | None = None,
    allow_lossy: bool = False,
    template: str | None = None,
    device_map: Any = "auto",
    dtype: str | torch.dtype = "auto",
    max_memory: dict | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
) -> Spec:
    """Load a target (directory or hub id) and what drafts for it, placed by accelerate, to decode and not to train.

    head: directory or hub id of a trained head of any kind. drafter: in its place, `kind:value` of
    `treespec.draft.sources.SOURCES`, such as lookup; with neither, one token is decoded at a time.
    tree: a name of `treespec.trees.policy.FORMS`; None is the scheme's default.
    verifier: a name of `treespec.verify.verifiers.NAMES`; a lossy one needs allow_lossy.
    trust_remote_code: run Python files that the target's or a draft model's directory brings.
    compile: the forwards of target and head, see `Target.compile`.
    Raises InputError, or HeadError and TreeError, for what cannot be used.
    """
    if head and drafter:
        raise InputError(f"both --head {head} and --drafter {drafter} are given: leave out one")
    named = drafter or (f"head:{head}" if head else None)
    model, sources = load_sources(
        target,
        [named] if named else [],
        device_map=device_map,
        dtype=dtype,
        max_memory=max_memory,
        trust_remote_code=trust_remote_code,
        compile=compile,
    )
    source = sources[named] if named else None
    return Spec(model, source, tree, verifier, template, allow_lossy, calibration_of(source, named))
