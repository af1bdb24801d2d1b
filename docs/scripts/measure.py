"""Measure the times in the tables of docs/: `python docs/scripts/measure.py COMMAND --help`.

The sides of a comparison take turns, so that other load on the machine hits all alike; the first round is not counted.
The output is a line about the machine and a Markdown table of medians.
"""

import itertools
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import typer
from torch import Tensor

from treespec import Spec, load
from treespec.api.load import load_parsed
from treespec.draft.auto.measure import MEASURED_NODES, measure_model_costs
from treespec.draft.builders import TreeBuilder
from treespec.draft.heads.loading import build_new_head, draft_along
from treespec.draft.lookup.guess import Guess
from treespec.draft.spec import DrafterSpec
from treespec.eval.questions import load_questions
from treespec.kernels.allocator import keep_freed_memory
from treespec.kernels.processor import describe_processor
from treespec.model.cache import TreeCache
from treespec.model.cpu.fused_layers import fuse
from treespec.model.cpu.packing import pack
from treespec.model.placement import AS_IT_IS
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler, TargetDistributions
from treespec.trees.layout import get_layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree
from treespec.verify.registry import load_verifier
from treespec.verify.scheme import Scheme
from treespec.verify.verdict import as_step, finish_step

app = typer.Typer(help=__doc__, add_completion=False)
CPU = torch.device("cpu")
CONTEXT = 192  # tokens in the cache before a tree
TEXTS_PER_ROW = 3  # of a batch


@app.callback()
def prepare() -> None:
    torch.set_grad_enabled(False)
    keep_freed_memory()


def milliseconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def measure_rounds(sides: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """Return each side's values by round. The sides take turns, after a round of warm-up."""
    values = {side: list[float]() for side in sides}
    for _ in range(1 + rounds):
        for side, measure in sides.items():
            values[side].append(measure())
    return {side: rows[1:] for side, rows in values.items()}


def medians(sides: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """Return the median of each side's values. The sides take turns, after a round of warm-up."""
    values = measure_rounds(sides, rounds)
    return {side: statistics.median(rows) for side, rows in values.items()}


def show(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Print a line about the machine and the table."""
    columns = list(columns)
    print(f"{describe_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(map(str, row))} |")


@app.command()
def costs(target: str, head: str, contexts: str) -> None:
    """Measure the target's forward over n nodes and the head's draft levels, in ms, for each context length."""
    spec, rows = load(target, head), []
    for context in map(int, contexts.split(",")):
        cost = measure_model_costs(spec.target, spec.proposer, context=context)
        seconds = [*cost.forward, cost.begin + cost.level, cost.level]
        rows.append([context, *(f"{1e3 * duration:.2f}" for duration in seconds)])
    show(["context", *MEASURED_NODES, "first draft level", "each further"], rows)


@cache
def prefilled(target: Target, context: int) -> TreeCache:
    committed = target.build_cache()
    target.prefill(committed, torch.arange(context)[None] % target.vocab_size)
    return committed


def forward_ms(target: Target, context: int, tree: TokenTree) -> float:
    """Measure a forward over the tree, in ms, after one of warm-up."""
    forward = partial(target.forward_tree, prefilled(target, context), tree)
    forward()
    return milliseconds(forward)


@app.command()
def forwards(
    target: str, forms: str = "float32,bfloat16", nodes: str = "1,4,8,16", rounds: int = 7,
    contexts: str = str(CONTEXT),
) -> None:  # fmt: skip
    """Measure the target's forward over a tree in each form of weights, in ms, for each context length; and their size.

    forms: dtypes, each measured with plain weights, packed weights and fused layers; and values of `--load-in`.
    """
    # 1. Load every form; all are in memory at once.
    targets: dict[tuple[str, str], Target] = {}
    for form in forms.split(","):
        if form in ("float32", "bfloat16", "float16"):
            for weights in ("plain", "packed"):
                targets[form, weights] = Target.load(target, dtype=form)
            pack(targets[form, "packed"].model)
            targets[form, "fused"] = Target.load(target, dtype=form)
            pack(targets[form, "fused"].model)
            fuse(targets[form, "fused"].model)
        else:
            targets[form, "as loaded"] = load(target, load_in=form).target

    # 2. Trees of four branches.
    trees = {}
    for n in map(int, nodes.split(",")):
        guess = Guess(range(1, n), [max(0, i - 4) for i in range(1, n)])
        trees[n] = guess.build_token_tree(0, torch.device("cpu"))
    sides = {
        (form, context, n): partial(forward_ms, targets[form], context, trees[n])
        for form, context, n in itertools.product(targets, map(int, contexts.split(",")), trees)
    }
    times, rows = medians(sides, rounds), []
    for form, context in dict.fromkeys(side[:2] for side in sides):
        size = f"{weight_bytes(targets[form].model) / 1e6:.0f}"
        cells = (f"{times[form, context, n]:.1f}" for n in trees)
        rows.append([*form, size, context, *cells])
    show(["form", "weights", "MB", "context", *trees], rows)


def weight_bytes(model: torch.nn.Module) -> int:
    """Sum the bytes of a model's weights; a shared tensor counts once."""

    def parts(weight: Tensor) -> list[Tensor]:  # the plain tensors inside a quantizer's class
        if flatten := getattr(weight, "__tensor_flatten__", None):
            return [part for name in flatten()[0] for part in parts(getattr(weight, name))]
        return [weight]

    plain_tensors = [part for weight in model.parameters() for part in parts(weight)]
    stored = {part.data_ptr(): part for part in plain_tensors}
    return sum(part.numel() * part.element_size() for part in stored.values())


@app.command()
def verify(
    verifiers: str = "rrs,rrs-wo,kseq,greedy,optimal,traversal", vocabulary: int = 151_936,
    rounds: int = 15,
) -> None:  # fmt: skip
    """Measure one verification of a tree of 65 nodes, in ms: node by node as on a CPU, all at once as on a GPU."""
    generator = torch.Generator().manual_seed(0)
    leaves = itertools.product(range(4), range(3), range(4))
    shape = StaticTree(tuple(dict.fromkeys(leaf[:n] for leaf in leaves for n in (1, 2, 3))))
    logits = 4 * torch.randn(shape.size, vocabulary, generator=generator)  # [N, V]
    p, rows = TargetDistributions(logits, Sampler(SamplingParams(1.0))), []
    for name in verifiers.split(","):
        verifier: Any = load_verifier(name)
        tree = drafted(verifier.scheme, shape, logits, generator)
        verify_at_once = partial(at_once, verifier)
        ways = verifier, verify_at_once
        sides = {way: partial(milliseconds, partial(way, tree, p, generator)) for way in ways}
        rows.append([f"`{name}`", *(f"{ms:.1f}" for ms in medians(sides, rounds).values())])
    show(["", "step by step", "at once"], rows)


def at_once(verifier: Any, *tree_and_masses: Any) -> Any:
    return finish_step(as_step(verifier.verify_on_device(*tree_and_masses)))


def drafted(
    scheme: Scheme, shape: StaticTree, logits: Tensor, generator: torch.Generator
) -> TokenTree:
    """Draft a tree from the target's logits [N, V] with noise."""
    draft_logits = logits + torch.randn(logits.shape, generator=generator)
    root, params = torch.zeros(1, dtype=torch.int64), SamplingParams(1.0)
    growth = TreeBuilder(shape, scheme).grow(root, draft_logits[:1], params, generator)
    levels = iter(get_layout(shape, CPU).levels[1:])
    try:
        next(growth)
        while True:
            growth.send(draft_logits[next(levels).nodes])
    except StopIteration as grown:
        return grown.value


@app.command()
def floor(
    target: str = "demo", tokens: int = 64, rounds: int = 5, long: int = 4096, sizes: str = "1,4,16",
    temperatures: str = "0,0.6,1", hard: bool = True,
) -> None:  # fmt: skip
    """Measure `auto` beside one token at a time, many texts at a time and where drafts help least.

    The cells: both speeds, the median of the rounds' ratios, and the tokens of a forward. The time of prompts does
    not count.
    sizes: how many texts are decoded together. Three times as many wait; when one ends, the next one enters.
    hard: also a long prompt of `long` tokens, a head that knows nothing, and drafts from the text alone.
    """
    # 1. The ways to draft: the default, a head with random weights, only the text.
    spec = load(target)
    torch.manual_seed(0)
    blank_head = build_new_head("eagle", spec.target).eval().to(spec.target.dtype)
    drafting = {"its head": spec}
    batches = list(map(int, sizes.split(",")))
    questions = []
    for number in range(TEXTS_PER_ROW * max(batches)):
        questions.append([{"role": "user", "content": f"Tell me about the number {number}."}])
    cases = []
    for batch in batches:
        texts = questions[: TEXTS_PER_ROW * batch]
        cases.append(("its head", f"{batch} at a time", texts, batch))
    if hard:
        blank = Spec(spec.target, blank_head, verifier="auto")
        text = list(range(300, 300 + long))  # an ascending list of tokens: nothing repeats
        drafting |= {
            "a head that knows nothing": blank,
            "the text alone": load(target, drafter="suffix"),
        }
        cases.append(("its head", f"a prompt of {long} tokens", [text], 1))
        cases.append(("a head that knows nothing", "1 at a time", questions[:TEXTS_PER_ROW], 1))
        cases.append(("the text alone", "1 at a time", questions[:TEXTS_PER_ROW], 1))

    # 2. Each case at each temperature; both sides take turns.
    rows = []
    for drafter, case, prompts, batch in cases:
        cells = []
        for temperature in map(float, temperatures.split(",")):
            taus: list[float] = []
            sides = {
                "auto": partial(
                    decode_rate, drafting[drafter], prompts, batch, tokens, temperature, taus
                ),
                "one": partial(decode_rate, spec.baseline(), prompts, batch, tokens, temperature),
            }
            rates = measure_rounds(sides, rounds)
            ratios = map(operator.truediv, rates["auto"], rates["one"])
            cells += [f"{statistics.median(rates[side]):.1f}" for side in ("one", "auto")]
            cells += [f"{statistics.median(ratios):.2f}", f"{taus[-1]:.2f}"]
        rows.append([drafter, case, *cells])
    columns = ["drafts from", ""]
    for temperature in temperatures.split(","):
        columns += [f"T = {temperature}: one token, tokens/s", "auto, tokens/s", "speedup", "τ"]
    show(columns, rows)


@app.command()
def long(
    target: str = "demo", drafters: str = "suffix,sparse:512@chain:4", suite: str = "mt-bench", questions: int = 4,
    tokens: int = 64,
) -> None:  # fmt: skip
    """Measure drafters beside one token at a time behind a long prompt: τ, tokens per second, and the speedup.

    The prompt is all of a suite, then `Answer question 1.`, 2, … MT-Bench has 7,900 tokens for `demo`. The time of
    prompts does not count.
    drafters: separated by commas, as `treespec eval` takes them. questions: how many are answered.
    """
    # 1. One target, and the ways to draft. Each reads the prompt once; later prompts share its beginning.
    kinds = DrafterSpec.parse_all(drafters)
    model, sources = load_parsed(target, kinds, AS_IT_IS)
    ways = {"one token at a time": Spec(model, None)}
    for kind, source in zip(kinds, sources, strict=True):
        name = kind.written
        if kind.tree:
            name += f"@{kind.tree}"
        ways[f"`{name}`"] = Spec(model, source, kind.tree)
    for spec in ways.values():
        spec.generate(ask_behind_all(suite, 1), max_new_tokens=2)

    # 2. Each case, question by question in turn.
    columns = [""]
    cells_by_way: dict[str, list[str]] = {way: [] for way in ways}
    for texts, temperature in ((1, 0.0), (1, 1.0), (4, 1.0)):
        counts = {way: LongCounts() for way in ways}
        for number in range(1, 1 + questions):
            for way, spec in ways.items():
                counts[way].add(spec, ask_behind_all(suite, number), texts, tokens, temperature)
        columns += [f"{texts} at a time, T = {temperature:g}: τ", "tokens/s", "speedup"]
        baseline = counts["one token at a time"].rate
        for way, count in counts.items():
            tau = f"{count.tokens / count.cycles:.2f}"
            cells_by_way[way] += [tau, f"{count.rate:.1f}", f"{count.rate / baseline:.2f}"]
    show(columns, ([way, *cells] for way, cells in cells_by_way.items()))


def ask_behind_all(suite: str, number: int) -> list[dict[str, str]]:
    """Write the prompt that holds all questions of a suite, and asks for the answer to one of them."""
    turns = ["\n".join(question.turns) for question in load_questions(suite)[0]]
    parts = [f"{i}. {turn}" for i, turn in enumerate(turns, 1)]
    return [{"role": "user", "content": "\n\n".join([*parts, f"Answer question {number}."])}]


@app.command()
def windows(
    target: str = "demo", head: str = "demo", suite: str = "mt-bench", sizes: str = "512,1024,2048",
    lengths: str = "1024,2048,4096,8192", steps: int = 3,
) -> None:  # fmt: skip
    """Measure a head's acceptance by the length of the text before a draft, with all of it and with a window.

    The text is all of a suite. α is Σ min(p, q) at temperature 1, after drafts that follow the text, in percent: its
    mean over the positions between two lengths, step 1 / step 2 / …
    sizes: of the windows. lengths: the ends of the columns.
    """
    # 1. The target's distributions over the draft tokens, once.
    spec = load(target, head=head)
    model, drafts = spec.target, spec.head
    assert drafts is not None
    tokens = torch.tensor(spec.encode(ask_behind_all(suite, 1)))
    features = model.compute_features(tokens[None], drafts.aux_layers, last=True)[0]
    inputs, last = model.split_features(features, drafts.aux_layers)
    kept = slice(None) if drafts.vocabulary is None else drafts.vocabulary
    p = torch.cat(
        [model.compute_output_logits(part).float().softmax(-1)[:, kept] for part in last.split(512)]
    )

    # 2. The head's, for each window.
    ends = list(map(int, lengths.split(",")))
    rows = []
    for size in (None, *map(int, sizes.split(","))):
        for attention in drafts.attentions:
            attention.window = size
        shares = []
        for step, logits in enumerate(draft_along(drafts, model, tokens, inputs, steps), 1):
            pairs = zip(p[step : step + len(logits)].split(512), logits.split(512), strict=True)
            shares.append(
                torch.cat([torch.minimum(x, y.float().softmax(-1)).sum(-1) for x, y in pairs])
            )
        cells = [f"window of {size}" if size else "all"]
        for begin, end in itertools.pairwise([0, *ends]):
            cells.append(" / ".join(f"{100 * share[begin:end].mean():.1f}" for share in shares))
        rows.append(cells)
    show(["the head sees", *(f"up to {end:,}" for end in ends)], rows)


@dataclass
class LongCounts:
    """What a way has decoded behind long prompts: tokens, cycles, and seconds without those of prompts."""

    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def add(
        self, spec: Spec, prompt: list[dict[str, str]], texts: int, tokens: int, temperature: float
    ) -> None:
        """Decode some answers to a prompt at a time, of `tokens` tokens each."""
        outputs = spec.generate(
            prompt,
            n=texts,
            max_new_tokens=tokens,
            temperature=temperature,
            seed=1,
            memory=None,
            ignore_eos=True,
        )
        for output in outputs:
            self.tokens += output.stats.new_tokens
            self.cycles += output.stats.cycles
            self.seconds += output.stats.seconds["total"] - output.stats.seconds["prefill"]


def decode_rate(
    spec: Spec, prompts: list[Any], batch: int, tokens: int, temperature: float,
    taus: list[float] | None = None,
) -> float:  # fmt: skip
    """Decode prompts, `batch` at a time. Returns tokens per second, prompts apart.

    taus: where the tokens of a forward are appended, a text's mean. Default: None, nowhere.
    """
    outputs = spec.generate(
        prompts, batch=batch, max_new_tokens=tokens, temperature=temperature, seed=1, memory=None, ignore_eos=True
    )  # fmt: skip
    decoded = sum(output.stats.new_tokens for output in outputs)
    seconds = sum(output.stats.seconds["total"] for output in outputs)
    if taus is not None:
        taus.append(decoded / sum(output.stats.cycles for output in outputs))
    return decoded / (seconds - sum(output.stats.seconds["prefill"] for output in outputs))


if __name__ == "__main__":
    app()
