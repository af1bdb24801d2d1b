"""Trees in code written for transformers, by one argument of generate."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from treespec.api.hf import Trees, find_model_path

target, head = sys.argv[1:3]
path = find_model_path(target)  # the directory of `demo`; another name as it is
model, words = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))
inputs = words("Once upon a time", return_tensors="pt")
trees = Trees(head)
out = model.generate(**inputs, max_new_tokens=32, do_sample=False, custom_generate=trees)
print(words.decode(out[0]), trees.stats[0].acceptance_length)
