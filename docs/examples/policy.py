"""A tree of your own: many first tokens, below each of them a chain."""

import sys

from treespec.trees.static import StaticTree


def fan(width, depth):
    """(1, 0, 0) is the first draw below the first draw below the second draw at the root."""
    return StaticTree(
        tuple((first,) + (0,) * below for first in range(width) for below in range(depth))
    )


if __name__ == "__main__":
    from treespec import load

    spec = load(*sys.argv[1:3]).configured(fan(width=3, depth=4), "rrs-wo")
    print(spec, spec.generate("Once upon a time", temperature=1.0, max_new_tokens=32, seed=0))
