"""Peak memory, prefill and the stages of a cycle after a long prompt. Linux only: reads /proc."""

import argparse
import re
from pathlib import Path

from treespec import load

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("length", type=int, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    # 1. Warm up with a short prompt: memory is counted from there.
    spec = load(options.target, options.head, "dynamic:depth=5,topk=6,nodes=24")
    kept = max(1, spec.target.vocab_size - 192)
    prompt = [min(50 + i * 7919 % kept, spec.target.vocab_size - 1) for i in range(options.length)]
    spec.generate(prompt[:64], max_new_tokens=16)
    before = peak()
    # 2. Answer the long prompt.
    stats = spec.generate(prompt, max_new_tokens=options.max_new_tokens).stats
    layers = spec.decoder.cache.tree_layers
    cache = sum(2 * tensor.numel() for layer in layers for tensor in layer.storage) / MIB
    # 3. Report memory and the time of a cycle's stages.
    memory = f"peak +{peak() - before:.0f} MiB, of which the cache {cache:.0f} MiB"
    print(f"prompt of {options.length} tokens: {memory}")
    print(f"prefill {stats.seconds['prefill']:.1f} s; a cycle, in ms:")
    for stage, spent in stats.seconds.items():
        if stage not in ("prefill", "total"):
            print(f"  {stage} {1e3 * spent / stats.cycles:.2f}")


def peak() -> float:
    """The process's largest resident memory so far, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
