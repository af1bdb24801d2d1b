"""A grammar holds for what follows the thought."""

import pytest
from training import tokenizer

from treespec.sampling.compiled_grammar import compile_grammar
from treespec.serve.thought_grammar import write_grammar
from treespec.serve.thoughts import detect_thought_form

GRAMMARS = {"regex": r"a/b\d", "json_schema": {"enum": ["x"]}, "grammar": 'start: "a" b\nb: "b"'}
ANSWERS = {"regex": "a/b3", "json_schema": '"x"', "grammar": "ab"}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_grammar_begins_after_the_thought(kind, added):
    words = tokenizer()
    if added:
        words.add_tokens(["<think>", "</think>"])
    form = detect_thought_form("</think>")
    answer = ANSWERS[kind]

    def is_complete(text, state):
        grammar = write_grammar(kind, GRAMMARS[kind], form, state, words.get_added_vocab())
        compiled = compile_grammar("grammar", grammar, words, len(words), frozenset([2]))
        matcher = compiled.start.deep_copy()
        tokens = words.encode(text, add_special_tokens=False)
        if matcher.validate_tokens(tokens) < len(tokens):
            return False
        matcher.consume_tokens(tokens)
        return matcher.is_accepting()

    assert is_complete(f"the user {{\n</think>\n\n{answer}", "open")
    assert not is_complete(answer, "open")
    assert not is_complete("the user\n</think>\n\nno", "open")
    assert is_complete(answer, "none")
    assert is_complete(f"<think>the user</think>{answer}", "none")
    assert not is_complete(f"the user {answer}", "none")
