"""The public API: `load` a target and a head, `generate` and `stream`."""

import re
from pathlib import Path
from typing import Any, TypeAlias, Unpack, cast, final, overload

from treespec.api.samples import build_groups, decode_groups
from treespec.draft.auto.cost import CostBy, CycleCost
from treespec.draft.auto.measure import measure_costs
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Proposer
from treespec.draft.source import Drafting, DraftSource, as_source
from treespec.engine.decoder import Decoder
from treespec.engine.options import (
    BatchKeywords,
    RequestKeywords,
    Seed,
    Seeds,
    parse_request_options,
)
from treespec.engine.output import Output, Stream
from treespec.engine.prepare import build_requests
from treespec.engine.request import Request
from treespec.errors import InputError
from treespec.files.locks import alone_with
from treespec.heads.head import Head
from treespec.model.target import Target
from treespec.options import require_whole_number
from treespec.text.prompts import Prompt, Prompts, Single, encode_prompt, split_prompts
from treespec.trees.policy import parse_policy
from treespec.trees.shape import Policy
from treespec.verify.registry import load_verifier
from treespec.verify.walk import Verifier

GeneratedOutputs: TypeAlias = Output | list[Output] | list[list[Output]]


@final
class Spec:
    """A target, a source of drafts, a tree policy and a verifier; without a source, the baseline.

    A Spec decodes one request, or one batch, at a time. Threads may share it: `generate` waits for
    another thread's `generate`, and supersedes an open stream. For two streams at a time use `new`;
    Specs of one target take turns, a cycle each.

    Args:
        target: The model that answers.
        source: A `DraftSource`, a trained head, a proposer or a drafter; None decodes one token at a time.
        tree: A tree policy, or its name. Default: chosen for the verifier. Not for drafters that build
            whole trees themselves.
        verifier: A verifier, or its name. Default: `auto`.
        template: Chat template of fschat by name. Default: the tokenizer's own.
        allow_lossy: Whether the verifier may change the distribution of the text.
        calibration: Of the trained head. Default: none.
        times: Seconds of a cycle by its tree. Default: measured on first use.

    Attributes:
        policy: The tree policy; None without one.
        decoder: Runs the cycles.
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
        times: CycleCost | CostBy | None = None,
    ) -> None:
        self.target = target
        self.template = template
        self.calibration = calibration
        if isinstance(verifier, str):
            verifier = load_verifier(verifier, allow_lossy)
        self.verifier = verifier
        if isinstance(tree, str):
            tree = parse_policy(tree)
        self.policy = tree
        self.source: DraftSource | None = None
        if source is None:  # the baseline: one token at a time
            self.times: CostBy = measure_costs(target, None, times)
            self.decoder = Decoder(target, None, verifier)
            return
        if target.tree_obstacle:
            raise InputError(target.tree_obstacle)
        self.source = as_source(source, target)
        self.times = measure_costs(target, self.proposer, times)
        drafter = self.source.build_drafter(tree, verifier, calibration, self.times)
        self.policy = drafter.policy
        self.decoder = Decoder(target, drafter, verifier, self.source.models)

    def __repr__(self) -> str:
        dtype = str(self.target.dtype).removeprefix("torch.")
        names = [self.name] + self.drafting_names + [dtype, str(self.target.device)]
        return f"Spec({', '.join(names)})"

    @property
    def name(self) -> str:
        """The target's directory without its path, or its hub id, or its architecture."""
        model = self.target.model
        name = str(model.name_or_path) or type(model).__name__
        if Path(name).is_dir():
            return Path(name).name
        return name

    @property
    def drafting_names(self) -> list[str]:
        """The names of drafter, tree and verifier, or `no drafter`."""
        if self.source is None:
            return ["no drafter"]
        names = [self.source.name]
        if self.policy:
            names.append(str(self.policy))
        names.append(f"verifier {self.verifier.name}")
        return names

    @property
    def drafting_sentence(self) -> str:
        """What drafts, for people, such as `drafts come from the text (suffix), verifier auto`."""
        if self.source is None:
            return "one token at a time, without drafts"
        name, *details = self.drafting_names
        name = re.sub(r"^suffix\b", "the text (suffix)", name)
        return f"drafts come from {', '.join([name, *details])}"

    @property
    def sharpness(self) -> tuple[float, ...]:
        """The factor of the draft logits at each draft step, from the calibration; () without one."""
        if self.calibration is None:
            return ()
        return self.calibration.sharpness

    @property
    def proposer(self) -> Proposer | None:
        """The draft model, if there is one."""
        if self.source is None:
            return None
        return self.source.proposer

    @property
    def head(self) -> Head | None:
        """The trained head, if there is one."""
        if self.source is None:
            return None
        return self.source.head

    def configured(
        self,
        tree: str | Policy | None = None,
        verifier: str | Verifier = "auto",
        allow_lossy: bool = False,
    ) -> "Spec":
        """Return a Spec of the same target and head with another tree and verifier. No weights are copied."""
        return Spec(
            self.target,
            self.source,
            tree,
            verifier,
            template=self.template,
            allow_lossy=allow_lossy,
            calibration=self.calibration,
            times=self.times,
        )

    def new(self) -> "Spec":
        """Return another Spec with the same parts, to decode a second request meanwhile. No weights are copied."""
        # A lossy verifier was allowed when this Spec was built.
        return self.configured(self.policy, self.verifier, allow_lossy=True)

    def baseline(self) -> "Spec":
        """Return a Spec that decodes one token at a time with the same target, to compare speeds with."""
        return Spec(self.target, None, template=self.template)

    def warm_up(self) -> None:
        """Decode a few tokens, so that what only the first call measures is done."""
        self.generate([0] * 8, max_new_tokens=8, memory=None)

    def measure(self) -> None:
        """Measure the cost of trees now, before an answer is timed. The first call takes seconds."""
        drafter = self.decoder.drafter
        if drafter and drafter.timed:
            with alone_with(self.decoder.models):
                self.times(1)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode a prompt as token ids, by `treespec.text.prompts.encode_prompt`. Raises InputError."""
        return encode_prompt(self.target, prompt, self.template)

    def request(
        self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[RequestKeywords]
    ) -> Request:
        """Build the decoder's request for a prompt. seed, options: as for `stream`. Raises InputError."""
        return self.requests(prompt, 1, seed=seed, **options)[0]

    def requests(
        self, prompt: Prompt, n: int, *, seed: Seed = None, **options: Unpack[RequestKeywords]
    ) -> list[Request]:
        """Build n requests for one prompt, which their decoder prefills once. Raises InputError.

        seed: of the first request; each next one has the next seed. options: as for `stream`.
        """
        request_options = parse_request_options(options, "seed")
        chat_variables = request_options.chat_template_kwargs
        ids = encode_prompt(self.target, prompt, self.template, chat_variables)
        self.measure()
        return build_requests(self.target, self.template, ids, request_options, seed, n)

    def stream(
        self, prompt: Prompt, *, seed: Seed = None, **options: Unpack[RequestKeywords]
    ) -> Stream:
        """Return an iterator that yields each piece of the answer once it is accepted.

        The stream ends with a SupersededError once this Spec begins another request.

        Args:
            prompt: A string, messages or token ids (`treespec.text.prompts`).
            seed: Of all draws, in [0, 2^64). The same seed and prompt give the same answer; with the same
                seed another prompt's draws are independent (`treespec.engine.prepare.build_generator`).
                Default: None draws a new seed; a `torch.Generator` draws the seed from its state.
            options: See `treespec.engine.options.RequestOptions`.

        Raises:
            InputError: For a prompt or options that cannot be used.
        """
        request = self.request(prompt, seed=seed, **options)
        pieces = (piece for _, piece in self.decoder.run([request]))
        return Stream(pieces, request.stats)

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
        **options: Unpack[RequestKeywords],
    ) -> GeneratedOutputs:
        """Return the answer to a prompt, or a list of answers to a list of prompts, which share forwards.

        Each answer is the same as for its prompt alone with that seed, up to rounding. Threads that
        generate wait for each other, and supersede an open stream of this Spec.

        Args:
            prompt: A string, messages or token ids, or a list of such (`treespec.text.prompts`).
            n: Return a list of n answers to each prompt, which is prefilled once. Default: None, one
                answer that is not in a list.
            batch: The most answers that are decoded at a time; the next one begins when one has ended.
                Default: all.
            seed: Of the first answer (each next answer has the next seed), or a list with one for each
                prompt. Default: a new one is drawn.
            options: As for `stream`.

        Raises:
            InputError: For a prompt or options that cannot be used; it names the prompt if there are several.
        """
        parse_request_options(options, "n", "batch", "seed")  # first: their error names no prompt
        samples = None
        if n is not None:
            samples = require_whole_number("n", n, least=1)
        prompts = split_prompts(prompt)
        if prompts is None:
            return self._generate_one(cast(Prompt, prompt), samples, batch, seed, options)
        return self._generate_batch(prompts, samples, batch, seed, options)

    def _generate_one(
        self,
        prompt: Prompt,
        n: int | None,
        batch: int | None,
        seed: Seeds,
        options: RequestKeywords,
    ) -> Output | list[Output]:
        """Return the answer to one prompt, or the list of its n answers. Arguments: as for `generate`."""
        if n is None:
            ((output,),) = self._generate_samples([prompt], 1, batch, seed, options)
            return output
        (outputs,) = self._generate_samples([prompt], n, batch, seed, options)
        return outputs

    def _generate_batch(
        self,
        prompts: list[Prompt],
        n: int | None,
        batch: int | None,
        seed: Seeds,
        options: RequestKeywords,
    ) -> list[Output] | list[list[Output]]:
        """Return the answer to each prompt, or the list of its n answers. Arguments: as for `generate`."""
        if n is None:
            groups = self._generate_samples(prompts, 1, batch, seed, options)
            return [output for (output,) in groups]
        return self._generate_samples(prompts, n, batch, seed, options)

    def _generate_samples(
        self,
        prompts: list[Prompt],
        samples: int,
        batch: int | None,
        seed: Seeds,
        options: RequestKeywords,
    ) -> list[list[Output]]:
        """Return `samples` answers to each prompt. Other arguments: as for `generate`."""
        total = len(prompts) * samples
        rows = total
        if batch is not None:
            rows = require_whole_number("batch", batch, least=min(1, total))
        if len(prompts) > 1 and options.get("on_cycle"):
            raise InputError("on_cycle hears of one answer at a time: give one prompt")
        groups = build_groups(self.requests, prompts, samples, seed, options)
        self.measure()
        return decode_groups(self.decoder, groups, rows)
