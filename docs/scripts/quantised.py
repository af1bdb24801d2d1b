"""Speed and memory of a target in each form of `--load-in`: one token at a time, and drafting.

All forms are in memory at once and take turns, so that what else the machine does hits all alike.
`none` is the target as its files hold it. `gguf` is the demo's GGUF file, fetched from its package,
and `unpacked` that file as plain weights. Speeds are medians over rounds, prefill included.
"""

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from treespec import Spec, load
from treespec.demo.convert import convert
from treespec.demo.fetch import gguf_from_package
from treespec.demo.known import DEMO, DEMO_MODEL

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function named split_words that splits a text into words.",
    "Give me three reasons to learn another language.",
)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEMO)
    parser.add_argument("--head", default=DEMO)
    parser.add_argument("--forms", nargs="+", default=["none", "int8", "gguf", "unpacked"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    # 1. Every form, with the same head.
    specs = {}
    with TemporaryDirectory(prefix="treespec-") as folder:
        for form in options.forms:
            target, load_in = placed(form, options.target, Path(folder))
            specs[form] = load(target, options.head, load_in=load_in, dtype=options.dtype)

    # 2. They answer in turn; the first round warms up.
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    lengths: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    same: dict[str, int] = defaultdict(int)
    for number in range(-1, options.rounds):
        question = QUESTIONS[number % len(QUESTIONS)]
        for form, spec in specs.items():
            one, plain, _ = answered(spec.baseline(), question, options.max_new_tokens)
            tree, drafted, length = answered(spec, question, options.max_new_tokens)
            if number < 0:
                continue
            speeds[form, "one"].append(one)
            speeds[form, "tree"].append(tree)
            ratios[form].append(tree / one)
            lengths[form].append(length)
            same[form] += plain == drafted

    # 3. The table.
    print(
        "| form | dtype | weights, MB | one token, tokens/s | drafting | ratio | τ | same tokens |"
    )
    print("|" + "---|" * 8)
    for form, spec in specs.items():
        one, tree = (statistics.median(speeds[form, way]) for way in ("one", "tree"))
        dtype = str(spec.target.dtype).removeprefix("torch.")
        cells = [f"`{form}`", dtype, f"{weight_bytes(spec) / 1e6:.0f}", f"{one:.1f}", f"{tree:.1f}"]
        cells += [f"{statistics.median(ratios[form]):.2f}", f"{statistics.mean(lengths[form]):.2f}"]
        print(f"| {' | '.join(cells)} | {same[form]} of {options.rounds} |")


def placed(form: str, target: str, folder: Path) -> tuple[str, str | None]:
    """The target and the `load_in` of a form. folder: for what is fetched."""
    if form not in ("gguf", "unpacked"):
        return target, None if form == "none" else form
    file = folder / Path(DEMO_MODEL.member).name
    if not file.exists():
        gguf_from_package(DEMO_MODEL, folder)
    if form == "gguf":
        return target, f"gguf:{file}"
    convert(file, folder / form)
    return str(folder / form), None


def answered(spec: Spec, question: str, tokens: int) -> tuple[float, list[int], float]:
    """Tokens a second of a greedy answer, its tokens, and its acceptance length."""
    chat = [{"role": "user", "content": question}]
    started = time.perf_counter()
    output = spec.generate(chat, max_new_tokens=tokens, ignore_eos=True)
    spent = time.perf_counter() - started
    return len(output.token_ids) / spent, output.token_ids, output.stats.acceptance_length


def weight_bytes(spec: Spec) -> int:
    """Bytes of the target's weights, each stored tensor once."""
    stored = {}
    for weight in spec.target.model.parameters():
        for part in parts(weight):
            stored[part.untyped_storage().data_ptr() if not part.is_mkldnn else id(part)] = (
                part.numel() * part.element_size()
            )
    return sum(stored.values())


def parts(weight: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor class of a quantizer holds; a plain tensor is its own."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(weight, name))]


if __name__ == "__main__":
    main()
