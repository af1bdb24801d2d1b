"""Answers by a JSON schema and by a regular expression."""

import json
import sys

from treespec import load

spec = load(*sys.argv[1:3])
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
person = spec.generate("A person, as JSON:", json_schema=schema, temperature=0.7, seed=0)
if person.stats.truncated:  # max_new_tokens or the context ended it: half an object
    print("cut:", person.text)
else:
    print(json.loads(person.text), person.stats.acceptance_length)

print(spec.generate("Is the sky blue?", regex="(yes|no), because [a-z ]{1,40}").text)
