"""Rows as training reads them, and what it learns from them."""

import json
from itertools import groupby

from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations


def examples_of(tmp_path, tokenizer, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return encode_conversations(tokenizer, read_conversations(file)[0], None, 10_000)


def learnt_answers(examples):
    """[(tokens before an answer, its tokens)] of each unbroken run under the masks."""
    learnt = []
    for example in examples:
        ids = example.input_ids.tolist()
        place = 0
        for counts, run in groupby(example.loss_mask.tolist()):
            end = place + len([*run])
            if counts:
                learnt.append((ids[:place], ids[place:end]))
            place = end
    return learnt
