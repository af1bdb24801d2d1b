"""Read the rotary positions of a head's config.json into one set of parameters.

Projects write them as `rope_scaling` or as `rope_parameters`, with `rope_theta` inside or at the top level.
"""

from collections.abc import Mapping
from typing import Any

from treespec.heads.formats.fields import FieldTable, as_object, drop_names
from treespec.heads.head import Config

COMMON_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
MULTIMODAL_FIELDS = ("mrope_section", "mrope_interleaved")  # in text the three positions are equal
PHIMOE_FIELDS = ("short_mscale", "long_mscale")  # for PhiMoE's layers; heads have Llama's
SCALED_FIELDS = ("factor", "original_max_position_embeddings")
ROPE_TYPE_FIELDS = {  # the fields that each type uses, as in transformers
    "default": (),
    "linear": SCALED_FIELDS,
    "dynamic": SCALED_FIELDS,
    "yarn": SCALED_FIELDS
    + ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": SCALED_FIELDS + ("attention_factor", "short_factor", "long_factor"),
    "proportional": ("factor",),
    "llama3": SCALED_FIELDS + ("low_freq_factor", "high_freq_factor"),
}
# By type: fields that are allowed with a neutral value only.
NEUTRAL_ROTARY_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {"default": {"factor": (1,)}}
UNUSED_ROPE_FIELDS = frozenset(MULTIMODAL_FIELDS + PHIMOE_FIELDS)
OUTSIDE_FIELDS = ("rope_theta", "partial_rotary_factor")  # may also stand at the top level
ROPE_FORMS = ("rope_parameters", "rope_scaling")
# This field marks a head that treespec trained: it has a copy of all the target's rotary parameters, and was
# trained with the angles that `heads.layers.Rotary` computes from them.
TRAINED_HERE = "target_tokens"


def read_rotary(config: Config) -> Config:
    """Reduce the rotary positions of a config to `rope_parameters`, if it has two forms or `mrope`.

    For text, `mrope` rotates as plain rotary positions do. Raises ValueError for an unknown type or field,
    and for forms that contradict each other.
    """
    forms = read_forms(config)
    top: Config = {}
    for name in OUTSIDE_FIELDS:
        if config.get(name) is not None:
            top[name] = config[name]
    check_agreement(forms | {"": top})
    multimodal = any(is_multimodal(config[name]) for name in forms)
    if len(forms) < len(ROPE_FORMS) and not multimodal:
        return config
    merged: Config = {}
    for form in forms.values():
        merged |= form
    return drop_names(config, ROPE_FORMS) | {"rope_parameters": merged}


def read_forms(config: Config) -> dict[str, Config]:
    """Read each form of rotary parameters in a config, by its name. Raises ValueError as `read_rotary`."""
    forms: dict[str, Config] = {}
    for name in ROPE_FORMS:
        if config.get(name):
            value = as_object(config[name], name)
            forms[name] = read_form(value, name, copied=TRAINED_HERE in config)
    return forms


def check_agreement(forms: Mapping[str, Config]) -> None:
    """Raises ValueError for a field with different values in two forms.

    forms: the fields of each form by its name; "" has the fields at the top level of config.json.
    """
    first: dict[str, tuple[Any, str]] = {}  # field -> its first value and where that stands
    for form, values in forms.items():
        for name, value in values.items():
            path = f"{form}.{name}".removeprefix(".")
            expected, first_path = first.setdefault(name, (value, path))
            if expected != value:
                raise ValueError(
                    f"{path} is {value!r}, and {first_path} is {expected!r}: delete the wrong one"
                )


def is_multimodal(value: Config) -> bool:
    """Whether rotary parameters are a multimodal model's, with three positions for each token."""
    if "mrope" in (value.get("rope_type"), value.get("type")):
        return True
    return any(value.get(name) for name in MULTIMODAL_FIELDS)


def read_form(value: Config, path: str, copied: bool) -> Config:
    """Read one form: its type becomes `rope_type`, and `mrope` becomes plain. Raises ValueError as `read_rotary`.

    copied: whether further fields, without effect, are allowed.
    """
    kind = value.get("rope_type") or value.get("type")
    if not kind or kind == "mrope":
        kind = "default"
    if kind not in ROPE_TYPE_FIELDS:
        types = ", ".join(ROPE_TYPE_FIELDS)
        raise ValueError(f"{path}.rope_type is {kind!r}: treespec knows {types}, and mrope in text")
    if not copied:
        table = FieldTable(
            used=frozenset(COMMON_FIELDS + ROPE_TYPE_FIELDS[kind]),
            unused=UNUSED_ROPE_FIELDS,
            only=NEUTRAL_ROTARY_VALUES.get(kind, {}),
        )
        table.check(value, f"{path}.")
    plain_form = drop_names(value, MULTIMODAL_FIELDS + ("type",))
    return plain_form | {"rope_type": kind}
