"""Random JSON schemas whose answers are short, for tests of answers by a schema."""

import random

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
    return rng.choice([_object, _array, _either])(rng, depth - 1)


def _object(rng, depth):
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng, depth):
    least = rng.randint(0, 2)
    most = least + rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": most}


def _either(rng, depth):
    return {"anyOf": [_any(rng, depth), {"type": "null"}]}


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
