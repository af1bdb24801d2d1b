"""What `load` gives: answers, streams, batches, another verifier, the baseline."""

import sys

from treespec import load

spec = load(*sys.argv[1:3])  # a target and a head, by default with --verifier auto
question = [{"role": "user", "content": "Why is the sky blue?"}]
answer = spec.generate(question, temperature=0.7, max_new_tokens=32, seed=0)
print(answer.text, answer.stats.acceptance_length, answer.stats.tokens_per_second)

for piece in spec.stream("Once upon a time", max_new_tokens=32):
    print(piece.text, end="*" if piece.drafted else "")  # accepted drafts bear a star

for answer in spec.generate(["One", "Two", "Three"], batch=2, max_new_tokens=16):
    print(answer.text)  # two at a time in one forward, each with a tree of its own

other = spec.configured("2x4", "rrs-wo")  # another tree and verifier, the same weights
baseline = spec.baseline()  # one token at a time, through the same target
print(other, baseline.generate("Once upon a time", max_new_tokens=16).text)
