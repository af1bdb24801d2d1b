"""One engine, many callers: requests enter the running batch and leave it, each with its options."""

import sys
from itertools import islice

from treespec import Engine, load

spec = load(*sys.argv[1:3])
with Engine(spec, batch=8, queue=64) as engine:
    poem = engine.submit("Once upon a time", max_new_tokens=64)
    options = {"temperature": 0.7, "max_new_tokens": 32}
    others = [engine.submit("The sea", seed=seed, **options) for seed in range(3)]
    for piece in islice(poem, 3):
        print(piece.text, end="")
    poem.cancel()  # it leaves after the present cycle; the others go on
    for answer in others:
        print(answer.result().text, answer.stats.acceptance_length)
