"""What a forward over drafts costs beside one over a token, on targets with recurrent layers.

The models have random weights: their text means nothing, and the ratio is the number of tokens a
cycle from which drafting pays.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treespec.model.target import Target
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree, balanced, chain
from treespec.trees.tree import TokenTree, root_only

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_next": {
        "layer_types": MIXED,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 0,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "mamba2": {"num_heads": 12, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
    "recurrent_gemma": {"lru_width": 384, "attention_window_size": 1024},
    "rwkv": {"attention_hidden_size": 384},
}
SHAPES = {
    "one token": None,
    "chain of 2": chain(2),
    "chain of 4": chain(4),
    "2 x 2": balanced(2, 2),
    "2 x 3": balanced(2, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--context", type=int, default=128, help="tokens before the drafts")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"| {' | '.join(['ms (ratio)', *SHAPES])} |")
    print(f"|{'---|' * (len(SHAPES) + 1)}")
    for kind in options.kinds:
        one, *others = times(kind, options.context, options.rounds)
        cells = [f"{one:.1f}", *(f"{other:.1f} ({other / one:.2f})" for other in others)]
        print(f"| {' | '.join([kind, *cells])} |", flush=True)


@torch.inference_mode()
def times(kind: str, context: int, rounds: int) -> list[float]:
    """Medians in ms of a forward and its commit, for each of SHAPES; they take turns.

    The deepest path is committed, and given back: so recurrent states are brought behind it too.
    """
    # 1. The model, and a text before the drafts.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind]))
    target = Target(model.eval())
    text = torch.randint(3, SIZES["vocab_size"], (1, context))
    trees = [tree_of(shape) for shape in SHAPES.values()]

    # 2. Each tree in turn, on a cache that ends where the text does.
    seconds: list[list[float]] = [[] for _ in trees]
    for turn in range(rounds + 2):
        for tree, own in zip(trees, seconds, strict=True):
            cache = target.new_cache(2 * context)
            target.prefill(cache, text)
            started = time.perf_counter()
            target.forward_tree(cache, tree)
            cache.commit([deepest(tree)])
            if turn > 1:  # the first rounds warm up
                own.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(own) for own in seconds]


def tree_of(shape: StaticTree | None) -> TokenTree:
    """A tree of arbitrary tokens. None: the root alone."""
    if shape is None:
        return root_only(torch.tensor([3]))
    known = layout(shape, torch.device("cpu"))
    return TokenTree(3 + torch.arange(shape.size), known.parents, known.depth, known.ancestors)


def deepest(tree: TokenTree) -> list[int]:
    """The path to the first of the deepest nodes."""
    node = int(tree.depth.argmax())
    return tree.ancestors[node].nonzero().flatten().tolist()


if __name__ == "__main__":
    main()
