"""The public API: `load` a target and a head, `generate` and `stream`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack, final, overload

from treespec.draft.auto.cost import Cost, CostBy
from treespec.draft.auto.measure import measured_costs
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Proposer
from treespec.draft.source import Drafting, source_for
from treespec.engine.batch import ALONE
from treespec.engine.decoder import Decoder
from treespec.engine.events import Cycle
from treespec.engine.options import BatchKeywords, Keywords, Seed, Seeds, requested
from treespec.engine.output import Output, Stream, output_of
from treespec.engine.prepare import requests_for, seeds_of
from treespec.engine.request import Piece, Request
from treespec.errors import InputError
from treespec.files.locks import alone_with
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.options import whole
from treespec.text.prompts import Prompt, Prompts, Single, encode, prompts_of
from treespec.trees.policy import policy
from treespec.trees.shape import Policy
from treespec.verify.registry import verifier_by_name
from treespec.verify.walk import Verifier


@final
class Spec:
    """A target, a source of drafts, a tree policy and a verifier; without a source, the baseline.

    source: a `Source`, a trained head, a proposer or a drafter. tree: None is the default for the
    verifier; a drafter that hands over whole trees takes none. times: None measures on first use.
    It decodes one text, or one batch, at a time. Threads may share it: `generate` waits for another
    thread's `generate`, and supersedes an open stream. For two streams at a time take `new`; Specs
    of one target take turns, a cycle each.
    """

    def __init__(
        self,
        target: Target,
        source: Drafting | None,
        tree: str | Policy | None = None,
        verifier: str | Verifier = "auto",
        template: str | None = None,
        allow_lossy: bool = False,
        calibration: Calibration | None = None,
        times: Cost | CostBy | None = None,
    ) -> None:
        self.target = target
        self.template = template
        self.calibration = calibration
        self.source = origin = None if source is None else source_for(source, target)
        named = verifier_by_name(verifier, allow_lossy) if isinstance(verifier, str) else verifier
        wanted = policy(tree) if isinstance(tree, str) else tree
        self.verifier = named
        self.times: CostBy = measured_costs(target, self.proposer, times)
        drafter = origin.drafter(wanted, self.verifier, calibration, self.times) if origin else None
        self.policy = drafter.policy if drafter else wanted
        self.decoder = Decoder(target, drafter, self.verifier, origin.models if origin else ())

    def __repr__(self) -> str:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return (
            f"Spec({', '.join([self.name, *self.drafting_names, dtype, str(self.target.device)])})"
        )

    @property
    def name(self) -> str:
        """The target's directory without its path, or its hub id, or its architecture."""
        model = self.target.model
        known = str(getattr(model, "name_or_path", "") or type(model).__name__)
        return Path(known).name if Path(known).is_dir() else known

    @property
    def drafting_names(self) -> list[str]:
        """The names of drafter, tree and verifier, or `no drafter`."""
        if self.source is None:
            return ["no drafter"]
        tree = [str(self.policy)] if self.policy else []
        return [self.source.name, *tree, f"verifier {self.verifier.name}"]

    @property
    def sharpness(self) -> tuple[float, ...]:
        """Of the head's calibration."""
        return self.calibration.sharpness if self.calibration else ()

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if there is one."""
        return self.source.proposer if self.source else None

    @property
    def head(self) -> Head | None:
        """The trained head, if there is one."""
        return self.source.head if self.source else None

    def configured(
        self,
        tree: str | Policy | None = None,
        verifier: str | Verifier = "auto",
        allow_lossy: bool = False,
    ) -> "Spec":
        """The same target and head with another tree and verifier; no weights are copied."""
        rest = (self.template, allow_lossy, self.calibration, self.times)
        return Spec(self.target, self.source, tree, verifier, *rest)

    def new(self) -> "Spec":
        """Another Spec with the same parts, for a second text at a time; no weights are copied."""
        return self.configured(self.policy, self.verifier, allow_lossy=True)  # it was allowed

    def baseline(self) -> "Spec":
        """One token at a time through the same target and cache: the base of every speedup."""
        return Spec(self.target, None, template=self.template)

    def warm_up(self) -> None:
        """Decode a few tokens, so that first-time measuring is over."""
        self.generate([0] * 8, max_new_tokens=8, memory=None)

    def measure(self) -> None:
        """Measure now, before an answer's clock runs, what trees cost; the first call takes seconds."""
        drafter = self.decoder.drafter
        if drafter and drafter.timed:
            with alone_with(self.decoder.models):
                self.times(1)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, by `treespec.text.prompts.encode`. Raises InputError."""
        return encode(self.target, prompt, self.template)

    def request(self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[Keywords]) -> Request:
        """The decoder's request for a prompt. seed: as for `stream`. Raises InputError."""
        return self.requests(prompt, 1, seed=seed, **options)[0]

    def requests(
        self, prompt: Prompt, n: int, *, seed: Seed = None, **options: Unpack[Keywords]
    ) -> list[Request]:
        """n requests for one prompt, for one decoder, which prefills it once. Raises InputError.

        seed: of the first; each other one has the next.
        """
        wanted = requested(options, "seed")
        ids = encode(self.target, prompt, self.template, wanted.chat_template_kwargs)
        self.measure()
        return requests_for(self.target, self.template, ids, wanted, seed, n)

    def stream(self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[Keywords]) -> Stream:
        """Pieces of the answer as they are accepted. prompt: see `treespec.text.prompts`.

        seed: of all draws, in [0, 2^64). The same seed and prompt give the same answer; with the same
        seed another prompt's draws are independent (`treespec.engine.prepare.generator_of`). None draws a
        new seed, and a `torch.Generator` draws it from there. options: see
        `treespec.engine.options.RequestOptions`. The stream ends with a SupersededError once this Spec begins
        another text.
        """
        text = self.request(prompt, seed=seed, **options)
        return Stream((piece for _, piece in self.decoder.run([text])), text.stats)

    @overload
    def generate(
        self, prompt: Prompts, *, n: None = None, **options: Unpack[BatchKeywords]
    ) -> list[Output]: ...
    @overload
    def generate(
        self, prompt: Single, *, n: None = None, **options: Unpack[BatchKeywords]
    ) -> Output: ...
    @overload
    def generate(
        self, prompt: Any, *, n: int | None = None, **options: Unpack[BatchKeywords]
    ) -> Any: ...
    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        n: int | None = None,
        batch: int | None = None,
        seed: Seeds = None,
        **options: Unpack[Keywords],
    ) -> Any:
        """The answer; for a list of prompts a list. One forward of the target serves a batch of them.

        prompt: see `treespec.text.prompts`. n: give a list of n answers to each prompt, which is
        prefilled once. batch: answers at a time, default all; the next one takes the place of a
        finished one. seed: of the first answer (each next answer gets the next seed), or a list with
        one for each prompt. options: as for `stream`. Each answer is the same as for its prompt alone
        with that seed, up to rounding. Threads that generate wait for each other, and supersede an
        open stream of this Spec. Raises InputError, which names the prompt of several.
        """
        # 1. Options, before any prompt is blamed for them.
        requested(options, "n", "batch", "seed")
        several = prompts_of(prompt)
        prompts: list[Any] = [prompt] if several is None else several
        each = whole("n", 1 if n is None else n, least=1)
        count = len(prompts)
        most = count * each
        at_once = whole("batch", most if batch is None else batch, least=min(1, most))
        if count > 1 and options.get("on_cycle"):
            raise InputError("on_cycle hears of one answer at a time: give one prompt")

        # 2. The requests.
        groups: list[list[Request]] = []
        for one, own_seed in zip(prompts, seeds_of(seed, count, each), strict=True):
            try:
                groups.append(self.requests(one, each, seed=own_seed, **options))
            except InputError as error:
                if count == 1:
                    raise
                raise InputError(f"prompt {len(groups) + 1} of {count}: {error}") from None

        # 3. Decode them together. Other threads wait meanwhile.
        self.measure()
        pieces: dict[Request, list[Piece]] = {text: [] for group in groups for text in group}
        with self.decoder.lock:
            for text, piece in self.decoder.run(list(pieces), at_once):
                pieces[text].append(piece)
        answers: list[Any] = [
            [output_of(pieces[text], text.stats) for text in group] for group in groups
        ]
        answers = [own for (own,) in answers] if n is None else answers
        return answers[0] if several is None else answers


def trace(
    spec: Spec, prompt: Prompt, *, seed: Seed = None, **options: Unpack[Keywords]
) -> Iterator[Cycle]:
    """The cycles of `spec.generate` with this prompt and seed, as they come.

    It decodes with a cache and drafter of its own; `spec` may decode other texts meanwhile.
    Raises InputError as `Spec.stream` does.
    """
    cycles: list[Cycle] = []
    options["on_cycle"] = cycles.append
    own = spec.new()
    own.decoder.stretch = ALONE  # others may decode with the models meanwhile
    for _ in own.stream(prompt, seed=seed, **options):
        yield from cycles
        cycles.clear()
