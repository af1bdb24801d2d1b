"""Let the grammar of an answer begin after the thought: one grammar of both, for llguidance."""

import json
import re
from collections.abc import Mapping
from typing import Any

from treespec.sampling.compiled_grammar import GRAMMAR_KINDS, build_llg_grammar, to_grammar_text
from treespec.serve.thoughts import ThoughtFormat, ThoughtState


def place_after_thought(
    options: Mapping[str, Any],
    form: ThoughtFormat | None,
    state: ThoughtState,
    added_tokens: Mapping[str, int],
) -> dict[str, Any]:
    """Let the grammar among the options of a request hold for what follows the thought.

    Args:
        options: keywords of `Spec.generate`.
        form: the format of thoughts; None for a model that writes none.
        state: whether the prompt has opened the thought, or closed it.
        added_tokens: ids of the tokenizer's added tokens, by their text.
    """
    kinds = [kind for kind in GRAMMAR_KINDS if options.get(kind) is not None]
    if form is None or len(kinds) != 1 or (state == "closed" and not form.heading):
        return dict(options)
    (kind,) = kinds
    others = {name: value for name, value in options.items() if name != kind}
    grammar = write_grammar(kind, options[kind], form, state, added_tokens)
    return others | {"grammar": grammar}


def write_grammar(
    kind: str,
    source: object,
    form: ThoughtFormat,
    state: ThoughtState,
    added_tokens: Mapping[str, int],
) -> str:
    """Write the grammar of a thought and of an answer to it, as `place_after_thought` describes.

    A regular expression `a+` after a thought between <think> and </think>, which are added tokens 7 and 8:

        start: (<[7]> body <[8]> GAP)? @answer
        body: /(.|\\n)*/
        GAP: /[ \\n]*/
    """
    # 1. The grammar of the answer, by the name `answer`.
    text = to_grammar_text(kind, source)
    answer = {"lark_grammar": text}
    if kind != "grammar":
        answer = json.loads(build_llg_grammar(kind, text))["grammars"][0]
    answer["name"] = "answer"

    # 2. The thought. Its end may be a token of its own, or text.
    closing = _write_mark(form.closing, added_tokens)
    body = "body: /(.|\\n)*/"
    if closing.startswith('"'):
        body = f"body[suffix={closing}]: /(.|\\n)*/"
        closing = ""
    gap = "GAP"
    if form.turn:
        gap = _write_mark(form.turn, added_tokens)
    thought = f"body {closing} {gap}"
    if state == "closed":
        thought = ""
    elif state == "none":
        thought = f"({_write_mark(form.opening, added_tokens)} {thought})?"
    lines = [f"start: {thought} {_write_mark(form.heading, added_tokens)} @answer"]
    if thought:
        lines.append(body)
    if "GAP" in thought:
        lines.append("GAP: /[ \\n]*/")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, answer]})


def _write_mark(text: str, added_tokens: Mapping[str, int]) -> str:
    """Write a text in Lark: added tokens by their ids, what is between them as strings."""
    parts = []
    names = sorted(added_tokens, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in names if name)
    pieces = [text]
    if pattern:
        pieces = re.split(f"({pattern})", text)
    for piece in pieces:
        if piece in added_tokens:
            parts.append(f"<[{added_tokens[piece]}]>")
        elif piece:
            parts.append(json.dumps(piece))
    return " ".join(parts)
