"""Where a JSON schema is broken: the deepest subschema that has the fault by itself."""

from collections.abc import Callable, Iterator

ONE = ("items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties")
SHARED = ("$defs", "definitions")  # what references point to


def broken_place(schema: object, fault: str, fault_of: Callable[[object], str]) -> str:
    """A JSON pointer from `#`, the whole schema, to the deepest subschema with this fault.

    fault_of: the fault of a schema, "" for none.

        {"properties": {"a": {"type": "object"}, "b": {"type": "strin"}}}    #/properties/b
    """
    # 1. Definitions, without which a subschema could not be looked at alone.
    whole = schema if isinstance(schema, dict) else {}
    shared = {name: whole[name] for name in SHARED if isinstance(whole.get(name), dict)}

    def faulty(child: object) -> bool:
        return fault_of(shared | child if isinstance(child, dict) else child) == fault

    # 2. Descend while a subschema has the fault; a reference leads to its definition.
    place, seen = "#", {"#"}
    while isinstance(schema, dict):
        below = [(place + step, child) for step, child in _children(schema) if faulty(child)]
        below += _definition(schema.get("$ref"), shared)
        if not below or below[0][0] in seen:
            break
        place, schema = below[0]
        seen.add(place)
    return place


def _children(schema: dict[str, object]) -> Iterator[tuple[str, object]]:
    """The subschemas of a schema, each with its steps of a JSON pointer."""
    for name in ONE:
        if isinstance(schema.get(name), dict | bool):
            yield f"/{name}", schema[name]
    for name in LISTED:
        if isinstance(children := schema.get(name), list):
            yield from ((f"/{name}/{place}", child) for place, child in enumerate(children))
    for name in NAMED:
        if isinstance(named := schema.get(name), dict):
            for key, child in named.items():
                yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", child


def _definition(reference: object, shared: dict[str, object]) -> list[tuple[str, object]]:
    """The definition that a `$ref` such as `#/$defs/a` names, if there is one."""
    for name, definitions in shared.items():
        start = f"#/{name}/"
        if isinstance(reference, str) and reference.startswith(start):
            assert isinstance(definitions, dict)
            key = reference.removeprefix(start)
            return [(reference, definitions[key])] if key in definitions else []
    return []
