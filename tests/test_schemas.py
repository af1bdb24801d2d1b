"""JSON schemas: every answer validates, whatever the schema and the seed; a broken schema says what is wrong."""

import json
import random
import re

import jsonschema
import pytest
from commands import complains
from models import random_head
from training import save_model, tokenizer

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.sampling.compiled_grammar import compile_grammar

WORDS = ("a", "id", "size", "the user", "x-1", 'quote"d', "naïve", "kind", "tags")


def random_schema(seed, depth=3):
    """A schema of objects, arrays, enums, numbers and strings, nested up to `depth` levels."""
    rng = random.Random(seed)
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": _leaf(rng)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _any(rng, depth):
    if depth == 0 or rng.random() < 0.4:
        return _leaf(rng)
    part = _any(rng, depth - 1)
    least = rng.randint(0, 2)
    array = {"type": "array", "items": part, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    return rng.choice([_object(rng, depth - 1), array, {"anyOf": [part, {"type": "null"}]}])


def _object(rng, depth):
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _leaf(rng):
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": rng.choice(WORDS)},
            {"enum": rng.sample([*WORDS, 1, 2.5, True, None], rng.randint(1, 4))},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(yes|no)$"])},
            {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
        ]
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    target = Target.load(str(save_model(tmp_path_factory.mktemp("target"))), dtype="float32")
    return Spec(target, random_head(target), "2x4", "rrs-wo")


def check(spec, seeds):
    """Answers at temperature 1 to random schemas, each with its own seed; how many were complete."""
    complete = 0
    for seed in seeds:
        schema = random_schema(seed)
        answer = spec.generate([1, 5], json_schema=schema, temperature=1.0, seed=seed, max_new_tokens=450)
        if not answer.stats.truncated:
            complete += 1
            checker = jsonschema.FormatChecker()
            jsonschema.validate(json.loads(answer.text), schema, format_checker=checker)
    return complete


def test_answers_validate(spec):
    assert check(spec, range(10)) >= 9


def test_at_temperature_0_trees_and_forced_tokens_change_no_answer(spec):
    for verifier, tree in (("topk", "dynamic:depth=4,topk=4,nodes=20"), ("rrs-wo", "2x4"), ("block", "chain:3")):
        for seed in range(3):
            options = {"json_schema": random_schema(seed), "max_new_tokens": 60}
            wanted = spec.baseline().generate([1, 5, seed], **options)
            answer = spec.configured(tree, verifier).generate([1, 5, seed], **options)
            assert answer.token_ids == wanted.token_ids


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_validate(spec):
    trees = ("auto", None), ("rrs-wo", "2x4"), ("traversal", "3x2"), ("topk", "dynamic:depth=3,topk=3,nodes=9")
    for part, (verifier, tree) in enumerate(trees):
        assert check(spec.configured(tree, verifier), range(250 * part, 250 * (part + 1))) >= 245


def nested(schema):
    return {"type": "object", "properties": {"a": {"type": "array", "items": {"properties": {"b/c": schema}}}}}


BROKEN = [
    ("json_schema", nested({"type": "strin"}), "json_schema: Invalid type: strin"),
    ("json_schema", {"properties": {"a": {"type": "string", "pattern": "("}}}, "error: unclosed group"),
    (
        "json_schema",
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"items": {"minItems": "x"}}}},
        "json_schema: Expected positive integer for 'minItems'",
    ),
    ("json_schema", {"type": "array", "uniqueItems": True}, "json_schema: Unimplemented keys"),
    ("json_schema", '{"type":', "json_schema is no JSON text: Expecting value: line 1 column 9"),
    ("json_schema", 5, "json_schema is 5, must be an object"),
    ("json_schema", False, "json_schema is False, must be an object"),
    ("json_schema", {"const": float("nan")}, "json_schema is no JSON"),
    ("json_schema", {"properties": {"\ud800": {}}}, "json_schema holds half of a surrogate pair"),
    ("json_schema", '{"items": ' * 400 + "{}" + "}" * 400, "json_schema is too large: recursion limit exceeded"),
    ("grammar", 'start: %json {"$ref": "#"}', "grammar cannot be satisfied"),
    ("regex", "[0-9]+(", "error: unclosed group"),
    ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
    ("regex", 5, "regex is 5, must be a string"),
    ("grammar", 'start: "a" b', 'grammar: at 1(8): unknown name: "b"'),
]


@pytest.mark.parametrize("kind, source, message", BROKEN)
def test_a_broken_grammar_is_refused_by_its_fault(spec, kind, source, message):
    with complains(re.escape(message)):
        spec.generate([1, 5], **{kind: source})


def test_grammars_for_targets_that_cannot_be_matched_are_refused_by_name(spec):
    with complains("json_schema and regex are given: leave out all but one"):
        spec.generate([1, 5], json_schema={}, regex="a")
    with complains("the target has no tokenizer"):
        compile_grammar("regex", "a", None, 290, frozenset({2}))
    with complains("needs a fast tokenizer"):
        compile_grammar("regex", "a", object(), 290, frozenset({2}))
    with complains("needs a token that ends the answer"):
        compile_grammar("regex", "a", tokenizer(), 290, frozenset())
