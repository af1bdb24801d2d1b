"""Trees in code written for transformers, by one argument of generate."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from treespec.api.hf import Trees
from treespec.demo.fetch import find_model_path

target, head = sys.argv[1:3]
folder = find_model_path(target)  # that of `demo`; other names as they are
model = AutoModelForCausalLM.from_pretrained(folder)
words = AutoTokenizer.from_pretrained(folder)
inputs = words("Once upon a time", return_tensors="pt")
trees = Trees(head)
out = model.generate(**inputs, max_new_tokens=32, do_sample=False, custom_generate=trees)
print(words.decode(out[0]), trees.stats[0].acceptance_length)
