"""Directories of block heads whose levels read the tokens above, as their projects write them, and what is refused."""

import pytest
import torch
from commands import complains
from drafters import BLOCK_TEXT, build_dflash, draft_paths
from head_files import QWEN3_CONFIG, SPECULATORS_DFLASH, Z_LAB, write_head
from models import close, randn, target

from treespec.draft.heads.block import ConditionalProposer
from treespec.draft.heads.loading import load_trained_head
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.registry import HEAD_KINDS, detect_kind

DOMINO = {"gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": 1}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 9}
DSPINE = {"transfer_rank": 6, "message_size": 5, "top_k": 9}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@torch.no_grad()
def draft_tree_of(head):
    """[8, N] draft logits at the nodes of a tree below a text."""
    model = target("llama")
    features = model.compute_features(BLOCK_TEXT[None, :-1], head.aux_layers)[0]
    return draft_paths(ConditionalProposer(head, model), model, BLOCK_TEXT[1:], features)


def check_directory(folder, config, tensors, expected):
    """The head in a directory drafts as the expected one, and so it does after it was saved and loaded."""
    loaded = load_trained_head(str(write_head(folder / "head", config, tensors)), target("llama"))
    assert detect_kind(config, tensors) == loaded.kind == expected.kind
    assert HEAD_KINDS[loaded.kind].levels(config, tensors) == loaded.max_depth == expected.max_depth
    save_head(loaded, folder / "again")
    for head in (loaded, load_head(folder / "again")):
        close(draft_tree_of(head), draft_tree_of(expected), 2e-4, 1e-4)
    return loaded


def own_output(rows=64):
    """An output layer, and tokens of its rows: in another order than ascending, if there are few."""
    torch.manual_seed(5)
    tensors = {"lm_head.weight": randn(rows, 32)}
    if rows < 64:
        tokens = torch.randperm(64)[:rows]
        tensors["d2t"] = tokens - torch.arange(rows)
        tensors["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill(0, tokens, True)
    return tensors


CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
DSPARK = CONFIDENT | {"markov_rank": 3, "markov_head_type": "vanilla"}
DEEPSPEC = {name: value for name, value in Z_LAB.items() if name != "dflash_config"} | DSPARK
DEEPSPEC |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 63, "num_anchors": 512}
DEEPSPEC |= {"target_layer_ids": [-1, 0, 1], "tie_word_embeddings": False}
NESTED = Z_LAB["dflash_config"] | DSPARK | {"projector_type": "dspark", "confidence_head_alpha": 1.0}
SPECFORGE = Z_LAB | {"architectures": ["DSparkDraftModel"], "dflash_config": NESTED | {"attention_mode": "gqa"}}
DRAFTED = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
SPECULATORS = SPECULATORS_DFLASH | DSPARK | {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
RANKLESS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": None}
AFTER = {"sample_from_anchor": False}
FILES = {  # config.json, further tensors, fields of the head that it is built from, what is before some names
    "DeepSpec": (DEEPSPEC, own_output(), {}, ""),
    "DeepSpec, gated": (DEEPSPEC | {"markov_head_type": "gated"}, own_output(), {"markov_head_type": "gated"}, ""),
    "DeepSpec, rnn": (DEEPSPEC | {"markov_head_type": "rnn"}, own_output(), {"markov_head_type": "rnn"}, ""),
    "SpecForge": (SPECFORGE, {}, {}, ""),
    "SpecForge, early": (SPECFORGE, {}, {}, "logit_head."),
    "speculators": (SPECULATORS | {"sample_from_anchor": True}, own_output(), {}, ""),
    "speculators, few tokens": (
        SPECULATORS | AFTER | {"draft_vocab_size": 20},
        own_output(20),
        AFTER | {"draft_vocab_size": 20, "own_output": True},
        "",
    ),
    "DeepSpec's DFlash": (DEEPSPEC | RANKLESS, own_output(), RANKLESS, ""),
    "speculators, by its number of drafts": (SPECULATORS | {"speculators_config": DRAFTED}, own_output(), {}, ""),
}


def with_output(head, tensors):
    """The head with an output layer of the file, its rows in the order of the tokens."""
    output = tensors.pop("lm_head.weight")
    tokens = torch.arange(64)
    if "d2t" in tensors:
        tokens = tensors["d2t"] + torch.arange(len(output))
        tensors["d2t"] = tokens.sort().values - torch.arange(len(output))
    made = type(head)(head.config | {"own_output": True, "draft_vocab_size": len(output)})
    tensors = dict(head.state_dict()) | tensors | {"lm_head.weight": output}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = tensors[name][tokens.argsort()]
    made.fill({name: tensors[name] for name in made.state_dict() if name in tensors})
    return made.eval()


@pytest.mark.parametrize("name", FILES)
def test_a_dspark_directory_of_each_project_drafts_as_documented(name, tmp_path):
    config, more, changes, before = FILES[name]
    head = build_dflash(kind="dspark", **DSPARK | changes)
    tensors = dict(head.state_dict()) | more
    inside = ("markov_head", "confidence_head")
    stored = {before * key.startswith(inside) + key: value for key, value in tensors.items()}
    expected = with_output(head, dict(more)) if more else head
    loaded = check_directory(tmp_path, config, stored, expected)
    assert (loaded.confidence_head is None) is (name == "DeepSpec's DFlash")


PUBLISHED_NAMES = {  # the projects' names of tensors that treespec names otherwise
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
    "transfer_codes.weight": "transfer_codes",
}
IN_DFLASH = Z_LAB["dflash_config"]
SHIFTED = {"projector_type": "domino", "shift_label": True}
DOMINO_FILE = Z_LAB | {
    "emb_dim": 5,
    "architectures": ["DominoDraftModel"],
    "dflash_config": IN_DFLASH | DOMINO | SHIFTED,
}
NOT_SHIFTED = IN_DFLASH | DOMINO | {"projector_type": "domino"}
DFLASH2_FILE = Z_LAB | {"architectures": ["DFlash2DraftModel"], "dflash_config": IN_DFLASH | DFLASH2}
OF_SPECULATORS = SPECULATORS_DFLASH | DFLASH2 | {"speculators_model_type": "dflash2"}
OF_SPECULATORS |= {"architectures": ["DFlash2DraftModel"]}
DSPINE_FILE = Z_LAB | {"architectures": ["DSpineDraftModel"], "dspine_config": DSPINE | {"ce_weight": 0.1}}
OTHER_FILES = {  # kind, config.json, fields of the head that it is built from
    "Domino of SpecForge": ("domino", DOMINO_FILE, DOMINO),
    "Domino of SpecForge, exported": ("domino", DOMINO_FILE | {"architectures": ["DFlashDraftModel"]}, DOMINO),
    "Domino of NeMo AutoModel": (
        "domino",
        Z_LAB | {"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": NOT_SHIFTED},
        DOMINO | {"sample_from_anchor": False},
    ),
    "DFlash 2 of z-lab": (
        "dflash2",
        DFLASH2_FILE | {"is_causal": False, "use_sliding_window": True} | WINDOWS,
        DFLASH2 | WINDOWS | {"causal": [False, False]},
    ),
    "DFlash 2 of NeMo AutoModel": ("dflash2", DFLASH2_FILE | {"architectures": ["Qwen3DFlash2DraftModel"]}, DFLASH2),
    "DFlash 2 of speculators": (
        "dflash2",
        OF_SPECULATORS | {"transformer_layer_config": QWEN3_CONFIG | WINDOWS, "sample_from_anchor": False},
        DFLASH2 | WINDOWS | {"causal": [False, False]},
    ),
    "DSpine of SpecForge": ("dspine", DSPINE_FILE, DSPINE),
}


def by_published_names(kind, head):
    tensors = {PUBLISHED_NAMES.get(name, name): value for name, value in head.state_dict().items()}
    if kind == "dspine":
        tensors["transfer_ready"] = torch.tensor(True)
    return tensors


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_directory_drafts_as_the_head_that_it_was_built_from(name, tmp_path):
    kind, config, changes = OTHER_FILES[name]
    head = build_dflash(kind=kind, **changes)
    check_directory(tmp_path, config, by_published_names(kind, head), head)


REFUSED = {  # config.json, the reason
    "no word of the convention": (SPECULATORS, "sample_from_anchor is missing, block_size is 5"),
    "an unknown type": (DEEPSPEC | {"markov_head_type": "lstm"}, "markov_head_type is 'lstm', must be one of"),
    "no rank": (DEEPSPEC | {"markov_rank": None}, "markov_rank is None"),
    "a memory of an unknown beginning": (
        SPECULATORS | {"markov_head_type": "rnn"} | AFTER,
        "'rnn' and sample_from_anchor is false",
    ),
    "a confidence head of no rank": (DEEPSPEC | {"markov_rank": 0}, "confidence_head_with_markov is true"),
    "two lists of layers": (
        SPECFORGE | {"target_layer_ids": [0, 1, 2]},
        r"target_layer_ids is \[0, 1, 2\], and dflash_config.target_layer_ids",
    ),
    "a field of tomorrow": (DEEPSPEC | {"markov_order": 2}, "markov_order is 2: treespec does not know"),
    "a nested field of tomorrow": (
        SPECFORGE | {"dflash_config": NESTED | {"markov_order": 2}},
        "dflash_config.markov_order is 2",
    ),
    "another projector": (
        DEEPSPEC | {"dflash_config": {"projector_type": "dflash"}},
        "dflash_config.projector_type is 'dflash'",
    ),
    "layers of Gemma": (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "is DSpark of other layers"),
    "layers of another family": (
        SPECULATORS | AFTER | {"transformer_layer_config": QWEN3_CONFIG | {"model_type": "gemma3_text"}},
        "model_type 'gemma3_text'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dspark_file_that_asks_for_more_is_refused_by_its_field(name, tmp_path):
    config, reason = REFUSED[name]
    tensors = build_dflash(kind="dspark", **DSPARK).state_dict()
    with complains(reason):
        load_head(write_head(tmp_path / "head", config, {**dict(tensors), **own_output()}))


ASKING = {  # kind, config.json, the reason
    "a conflict of two places": (
        "domino",
        DOMINO_FILE | {"emb_dim": 7},
        "emb_dim is 7, and dflash_config.emb_dim is 5",
    ),
    "no width": (
        "domino",
        DOMINO_FILE | {"emb_dim": None, "dflash_config": NOT_SHIFTED | {"emb_dim": None}},
        "emb_dim",
    ),
    "a cap on the logits": (
        "dflash2",
        DFLASH2_FILE | {"dflash_config": IN_DFLASH | DFLASH2 | {"final_logit_softcapping": 20.0}},
        "dflash_config.final_logit_softcapping is 20.0: treespec does not cap",
    ),
    "a factor on the logits": (
        "dflash2",
        DFLASH2_FILE | {"dflash_config": IN_DFLASH | DFLASH2 | {"output_multiplier": 0.2}},
        "output_multiplier is 0.2: treespec does not scale",
    ),
    "groups that do not fit": (
        "dflash2",
        DFLASH2_FILE | {"dflash_config": IN_DFLASH | DFLASH2 | {"conv_group_size": 7}},
        "conv_group_size is 7, must divide hidden_size, 32",
    ),
    "no taps": ("dflash2", DFLASH2_FILE | {"dflash_config": IN_DFLASH}, "conv_kernel_size"),
    "a window within the block": (
        "domino",
        DOMINO_FILE | WINDOWS | {"sliding_window": 3},
        "sliding_window is 3, and block_size 5: projects disagree",
    ),
    "rows that see later ones": ("dspine", DSPINE_FILE | {"is_causal": False}, "is_causal is False"),
    "a part of tomorrow": ("dspine", DSPINE_FILE | {"dspine_config": DSPINE | {"hops": 2}}, "dspine_config.hops is 2"),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_block_head_that_asks_for_more_is_refused_by_its_field(name, tmp_path):
    kind, config, reason = ASKING[name]
    sizes = {"domino": DOMINO, "dflash2": DFLASH2, "dspine": DSPINE}[kind]
    tensors = by_published_names(kind, build_dflash(kind=kind, **sizes))
    with complains(reason):
        load_head(write_head(tmp_path / "head", config, tensors))


@pytest.mark.parametrize("ready, reason", [(None, "lacks transfer_codes"), (False, "transfer_ready is false")])
def test_a_dspine_directory_without_its_codes_is_refused(ready, reason, tmp_path):
    """Tencent's own directories have them in another file."""
    tensors = by_published_names("dspine", build_dflash(kind="dspine", **DSPINE))
    if ready is None:
        del tensors["transfer_codes"], tensors["transfer_ready"]
    else:
        tensors["transfer_ready"] = torch.tensor(ready)
    with complains(reason):
        load_head(write_head(tmp_path / "head", DSPINE_FILE, tensors))
