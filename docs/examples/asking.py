"""What a request may ask: each answer has exactly the distribution of the changed logits, trees and all."""

import sys

from transformers import NoRepeatNGramLogitsProcessor

from treespec import load

spec = load(*sys.argv[1:3])
options = {"temperature": 0.8, "max_new_tokens": 24, "seed": 0}

penalised = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {11: -2.0}}
print(spec.generate("Once upon a time", **penalised, **options).text)

processor = NoRepeatNGramLogitsProcessor(2)  # any function of token ids and scores
print(spec.generate("Once upon a time", logits_processor=processor, **options).text)

answer = spec.generate("Once upon a time", logprobs=True, top_logprobs=2, **options)
for entry in answer.logprobs[:3]:
    print(entry.token, entry.logprob, entry.top)  # of the target's raw logits

for answer in spec.generate("Once upon a time", n=3, **options):  # one prefill
    print(answer.text, answer.stats.cached_tokens)

spec.generate("The sea", on_cycle=lambda cycle: print(cycle.number, cycle.texts), **options)
