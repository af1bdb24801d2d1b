"""The format of EAGLE-4 heads that NeMo AutoModel documents and exports: `LlamaForCausalLMEagle4`.

Read in the documentation of `nemo_automodel.components.speculative.eagle` (`eagle4`, `export_eagle4` and `draft_llama`;
the nightly version on 29 November 2026), which names the tensors, `num_candidates`, and says that config.json has the
fields of EAGLE-3.1, a window and the candidate head.
"""

from treespec.heads.formats import fields
from treespec.heads.formats.eagle import NORM_FLAGS, read_features
from treespec.heads.formats.vocabulary import OUTPUT_TENSOR, derive_vocabulary
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING_ATTENTION

ESTIMATE_TENSOR = "efficient_lm_head.weight"  # [Vd, r]
DOWN_TENSOR = "efficient_lm_head_down_proj.weight"  # [r, H]


def read_eagle4(config: Config, tensors: Tensors) -> Stored:
    """Read EAGLE-4: EAGLE-3's fields and tensors, a window on its layer, and the low-rank head.

    The tensors decide the rank. Raises ValueError if the file does not say how many candidates there are, or whether
    the next step's feature is normed, and if it contradicts itself.
    """
    # 1. The low-rank head.
    for name in (OUTPUT_TENSOR, ESTIMATE_TENSOR, DOWN_TENSOR):
        if name not in tensors:
            raise ValueError(f"it lacks {name}: a head without candidates is of EAGLE-3")
    fields.EAGLE4_TABLE.check(config)
    candidates = read_candidates(config, len(tensors[DOWN_TENSOR]))
    if len(tensors[ESTIMATE_TENSOR]) != len(tensors[OUTPUT_TENSOR]):
        raise ValueError(
            f"{ESTIMATE_TENSOR} has {len(tensors[ESTIMATE_TENSOR])} rows, and {OUTPUT_TENSOR} "
            f"{len(tensors[OUTPUT_TENSOR])}: both have one for each token"
        )

    # 2. The parts of EAGLE-3.1.
    if not has_flag(config, "norm_output"):
        raise ValueError(
            "norm_output is missing, and no tensor tells it: set it to true if the next step reads the normed state, "
            "as in EAGLE-3.1"
        )
    plain = fields.drop_names(config, (fields.CANDIDATE_COUNT, "candidate_head"))
    estimates = tensors[ESTIMATE_TENSOR]
    _, ordered = derive_vocabulary(plain, tensors | {OUTPUT_TENSOR: estimates})
    tensors = tensors | {ESTIMATE_TENSOR: ordered[OUTPUT_TENSOR]}
    flat, tensors = read_features(
        name_window(plain), tensors, fields.EAGLE4_TABLE, fields.EAGLE4_TABLE
    )
    return flat | {"candidate_head": candidates}, tensors


def has_flag(config: Config, name: str) -> bool:
    """Whether a config says yes or no to a part, by the name of TensorRT-LLM too."""
    names = [name, *(theirs for theirs, ours in NORM_FLAGS.items() if ours == name)]
    objects = (config, fields.get_object(config, "eagle_config"))
    return any(part.get(flag) is not None for part in objects for flag in names)


def read_candidates(config: Config, rank: int) -> Config:
    """Read the rank and the number of candidates, at the top or in `candidate_head`.

    rank: by the tensors. Raises ValueError if the number is missing, and for contradictions.
    """
    nested = fields.get_object(config, "candidate_head")
    counts = {
        part[fields.CANDIDATE_COUNT]
        for part in (nested, config)
        if part.get(fields.CANDIDATE_COUNT) is not None
    }
    if not counts:
        raise ValueError(
            f"candidate_head.{fields.CANDIDATE_COUNT} is missing, the number of tokens that get logits in a "
            "draft step: take it from the head's repository"
        )
    if len(counts) > 1:
        raise ValueError(
            f"{fields.CANDIDATE_COUNT} is {sorted(counts)}, at the top and in candidate_head: which counts is not known"
        )
    if nested.get("rank") not in (None, rank):
        raise ValueError(
            f"candidate_head.rank is {nested['rank']}, and {DOWN_TENSOR} has {rank} rows"
        )
    return {"rank": rank, fields.CANDIDATE_COUNT: counts.pop()}


def name_window(config: Config) -> Config:
    """Say in `layer_types` that the only layer has the window `sliding_window`; without a window nothing changes.

    Raises ValueError if `use_sliding_window` is false beside a window.
    """
    if not config.get("sliding_window") or config.get("layer_types"):
        return config
    if config.get("use_sliding_window") is False:
        raise ValueError(
            f"sliding_window is {config['sliding_window']}, and use_sliding_window is false: delete one of them"
        )
    return config | {"layer_types": [SLIDING_ATTENTION]}
