"""Small random models of every architecture, their tokenizer, and a model whose next-token distribution is a table."""

import inspect
from functools import cache, partial
from typing import Any, ClassVar

import torch
import transformers as hf
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from treespec.draft.heads.loading import build_new_head
from treespec.draft.vocabulary import restrict
from treespec.engine.output import Output
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.sampling.sampler import Sampler
from treespec.trees.layout import get_layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree


def join_tokens(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def random_prompts(count, longest=40, seed=3) -> list[list[int]]:
    generator = seeded(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def close(found, wanted, atol, rtol=0.0) -> None:
    """Tensors of one shape and dtype whose numbers differ by no more than atol + rtol * |wanted|."""
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)


def seeded(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# In float32, also where a program has another default dtype (conftest's TEST_DTYPE).
ones = partial(torch.ones, dtype=torch.float32)
rand = partial(torch.rand, dtype=torch.float32)
randn = partial(torch.randn, dtype=torch.float32)
zeros = partial(torch.zeros, dtype=torch.float32)


def same_weights(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


VOCAB = 64
WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2} | WIDTH
UNGATED = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
GROUPED = COMMON | {"num_key_value_heads": 2}
ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=16),
    "mistral-window-6": lambda: hf.MistralConfig(**GROUPED, sliding_window=6),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GROUPED, head_dim=16, sliding_window=6, layer_types=ALTERNATING, final_logit_softcapping=3.0
    ),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, head_dim=16, sliding_window=6, attn_logit_softcapping=3.0),
    "phi3": lambda: hf.Phi3Config(**GROUPED, pad_token_id=0),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: hf.OPTConfig(**UNGATED, ffn_dim=48, word_embed_proj_dim=16),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**COMMON),
    "falcon": lambda: hf.FalconConfig(**UNGATED),
    "cohere": lambda: hf.CohereConfig(**GROUPED, pad_token_id=0),
    "granite": lambda: hf.GraniteConfig(**GROUPED, logits_scaling=0.5, embedding_multiplier=2.0),
    "gpt-oss": lambda: hf.GptOssConfig(
        **GROUPED,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=6,
        layer_types=ALTERNATING,
    ),
}


def random_model(config, seed=0, spread=0.1) -> hf.PreTrainedModel:
    """A model of that architecture whose logits are far from flat, so that a wrong mask shows.

    The vectors of norms and biases are random too, so that one in another's place shows. spread: of these
    numbers; 0 leaves the vectors as a new model has them.
    """
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    vectors = []
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)
        else:
            vectors.append(parameter)
    with torch.no_grad():
        for vector in vectors:
            vector += spread * torch.randn_like(vector)
    return model.eval()


@cache
def target(name) -> Target:
    with torch.inference_mode(mode=False):  # tests in any mode share it
        return Target(random_model(CONFIGS[name]()))


def small(seed=5, **changes) -> Target:
    """A Llama of one layer."""
    return Target(random_model(hf.LlamaConfig(**GROUPED | {"num_hidden_layers": 1} | changes), seed))


def prompt(length=7, seed=3) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=seeded(seed)).tolist()


PROMPT_LENGTHS = (7, 60, 1, 19)  # tokens of the prompts; one token leaves nothing to draft from


def prompts_of_lengths(lengths=PROMPT_LENGTHS):
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


def plain_generate(target, ids, new) -> list[int]:
    """What transformers' greedy generate says after a prompt."""
    out = target.model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def as_undrafted(spec, prompts, new, **options) -> list[Output]:
    """The greedy completions of several prompts: drafts change no token of each alone."""
    outputs = spec.generate(prompts, max_new_tokens=new, **options)
    plain = spec.baseline()
    alone = [plain.generate(one, max_new_tokens=new).token_ids for one in prompts]
    assert [output.token_ids for output in outputs] == alone
    return outputs


def what(outputs):
    """The tokens of each completion, and how many drafts each of its cycles accepted."""
    return [(output.token_ids, output.stats.accepted) for output in outputs]


def random_head(target, seed=0) -> EagleHead:
    torch.manual_seed(seed)
    return build_new_head("eagle", target).eval()


def random_eagle3(target, seed=0, drafted=None, kind="eagle3", **fields) -> Eagle3Head:
    """drafted: [Vd] the tokens that it drafts, None is all."""
    torch.manual_seed(seed)
    head = build_new_head(kind, target, **fields).eval()
    nn.init.normal_(head.lm_head.weight)
    if drafted is not None:
        restrict(head, target, drafted)
    return head


class TableConfig(hf.PreTrainedConfig):
    model_type = "treespec-table"
    attribute_map: ClassVar = {"num_hidden_layers": "layers"}

    def __init__(self, vocab_size=4, seed=0, eos_token_id=None, **kwargs):
        self.vocab_size = vocab_size
        self.seed = seed
        self.layers = 1
        self.max_position_embeddings = 4096
        self.hidden_size = vocab_size
        self.num_attention_heads = 1
        super().__init__(eos_token_id=eos_token_id, **kwargs)


class TableDecoder(nn.Module):
    """Its last hidden state is the table's logits after the last two tokens that a node sees.

    The token before is read off the mask, as attention would: it goes through the cache like keys.
    """

    def __init__(self, config):
        super().__init__()
        v = config.vocab_size
        generator = seeded(config.seed)
        self.table = nn.Parameter(1.5 * randn(v, v, v, generator=generator))
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        **_,
    ):
        n = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(n)[None]
        marks = torch.stack([input_ids, position_ids], dim=-1).float()[:, None]  # [B, 1, N, 2]
        if past_key_values is not None:
            marks, _ = past_key_values.update(marks, marks, 0)
        # [B, T]
        tokens = marks[:, 0, :, 0].long()
        positions = marks[:, 0, :, 1].long()
        seen = torch.ones(1, n, n).tril() > 0 if attention_mask is None else attention_mask[:, 0] == 0
        is_before = seen & (positions[:, None] == position_ids[..., None] - 1)  # [B, N, T]
        assert (is_before.sum(-1) <= 1).all()
        before = (is_before * tokens[:, None]).sum(-1)  # token 0 stands before the first position
        return BaseModelOutputWithPast(last_hidden_state=self.layers[0](self.table[before, input_ids]))


class TableModel(hf.PreTrainedModel):
    """A decoder of a few tokens whose next-token distribution is a table over the last two tokens."""

    config_class = TableConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = TableDecoder(config)
        self.embed = nn.Embedding(config.vocab_size, config.vocab_size, dtype=torch.float32)
        nn.init.normal_(self.embed.weight, generator=seeded(config.seed))
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False, dtype=torch.float32)
        nn.init.eye_(self.lm_head.weight)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model

    def forward(self, input_ids, **kwargs):
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return hf.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


def follow(drafter, features, following):
    """Let a drafter or proposer observe features [n, H] and the token [n] after each; that of the first is token 0."""
    drafter.observe([features], [torch.cat([following[:1] * 0, following])])


def draft_tree(drafter, root, params, generator):
    """The tree of one text, by a drafter that needs no target's cache."""
    return drafter.draft_trees(root, [Sampler(params)], [generator], TreeCache(layers=1))[0]


SIZES: dict[int, str] = {  # every field of that name, in whatever config it stands
    1: "n_group topk_group mamba_n_groups mamba_ngroups n_groups n_shared_experts num_shared_experts bos_token_id "
    "n_langs",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok top_k_experts moe_topk moe_k "
    "index_n_heads linear_num_key_heads linear_num_value_heads eos_token_id type_vocab_size encoder_layers "
    "num_encoder_layers depth num_global_layers",
    3: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads mamba_n_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts mamba_num_heads linear_num_heads time_step_rank mamba_dt_rank rotary_dim "
    "patch_size attention_heads",
    6: "sliding_window sliding_window_size attention_window_size attention_chunk_size",
    8: "head_dim kv_channels d_head dim_head attention_head_size attention_head_dim swa_head_dim kv_lora_rank "
    "q_lora_rank o_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state ssm_state_size state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input image_size "
    "audio_soft_tokens_per_image",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size qk_head_dim "
    "expert_ffn_hidden_size index_head_dim mamba_d_head mamba_head_dim",
    32: "hidden_size d_model n_embd emb_dim dim_model embedding_size word_embed_proj_dim lru_width embed_dim "
    "attention_hidden_size audio_hidden_size output_dim out_hidden_size vision_output_dim output_channels",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size dff d_inner decoder_ffn_dim encoder_ffn_dim dim_ff "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size mlp_dim "
    "shared_intermediate_size",
    64: "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size mamba_d_ssm",
    128: "max_position_embeddings n_positions max_seq_len n_ctx context_length max_target_positions "
    "max_source_positions",
    0: "pad_token_id num_kv_shared_layers",
}
TINY = {name: size for size, fields in SIZES.items() for name in fields.split()}
ATTENTIONS = ("full_attention", "sliding_attention")
SIGLIP = {"model_type": "siglip_vision_model"} | TINY
OWN: dict[str, dict[str, Any]] = {}
DELTA = "bailing_hybrid granitemoehybrid kimi_linear qwen3_5_text qwen3_5_moe_text qwen3_next"
INDEXED = "axk2 deepseek_v32 glm_moe_dsa hy_v4"  # their attention sees the columns that an index chooses
EXPANDED = "axk1 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite minicpm3 youtu"  # keys and values by query head
OWN |= {name: {"num_key_value_heads": 4} for name in EXPANDED.split()}
OWN |= {name: {"num_key_value_heads": 4, "index_topk": 32} for name in INDEXED.split()}
OWN |= {name: {"layer_types": ["linear_attention", "full_attention", "linear_attention"]} for name in DELTA.split()}
OWN["kimi_linear"]["num_key_value_heads"] = OWN["bailing_hybrid"]["num_key_value_heads"] = 4
OWN |= {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16)},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zamba": {"num_hidden_layers": 12, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3": {"vision_config": SIGLIP},
    "fuyu": {"text_config": {"model_type": "persimmon"} | TINY, "image_size": 8, "patch_size": 4},
    "got_ocr2": {"text_config": {"model_type": "qwen2"} | TINY},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"} | TINY},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text"} | TINY | {"hidden_size_per_layer_input": 0}},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ATTENTIONS}
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
}


def tiny(kind, own=None):
    """A small config of a class, and of the classes within it."""
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    values: dict[str, Any] = {name: size for name, size in TINY.items() if name in known}
    for name, inner in kind.sub_configs.items():
        if inner is not AutoConfig:
            values[name] = tiny(inner, OWN.get(inner.model_type)).to_dict()
    return kind(**values | OWN.get(kind.model_type, {}) | (own or {}))


MODELS = CONFIG_MAPPING  # the class of a config by its name, imported when it is asked for
MODEL_NAMES = {CONFIG_MAPPING_NAMES[name]: name for name in reversed(NAMES) if name in CONFIG_MAPPING_NAMES}.values()
SHORT_PROMPT = [3, 4, 5, 6]


def generate_plainly(model):
    ids = torch.tensor([SHORT_PROMPT])
    return model.generate(input_ids=ids, do_sample=False, max_new_tokens=12, eos_token_id=None)[
        0, len(SHORT_PROMPT) :
    ].tolist()


def generate_with(spec):
    return spec.generate(SHORT_PROMPT, max_new_tokens=12, ignore_eos=True).token_ids


BRANCHING_TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)))
PREFIX_TOKENS = 9  # longer than the sliding window of 6
LOGITS_TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def random_tree(seed=0) -> TokenTree:
    shape = get_layout(BRANCHING_TREE, torch.device("cpu"))
    tokens = torch.randint(3, VOCAB, (BRANCHING_TREE.size,), generator=seeded(seed))
    return TokenTree(tokens, shape.parents, shape.depth, shape.ancestors)


def random_prefix(seed=1, length=PREFIX_TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=seeded(seed))


def plain_logits(model, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def list_node_paths(tree):
    """(node, nodes from the root to it) for every node."""
    return [(i, tree.ancestors[i].nonzero().flatten().tolist()) for i in range(len(tree.tokens))]


ARCHITECTURE_TOLERANCE = 1e-3


def check_head_fits(head, target):
    """A head takes the target's own features, those of a prefill and those of training alike."""
    text = random_prefix(length=9)
    features = target.compute_features(text, head.aux_layers)
    close(
        target.prefill(target.build_cache(), text, head.aux_layers),
        features,
        ARCHITECTURE_TOLERANCE,
        ARCHITECTURE_TOLERANCE,
    )
    hidden = head.forward_step(text, head.fuse(features), torch.arange(9))
    logits = head.compute_logits(hidden, target)
    assert logits.shape == (1, 9, target.vocab_size)
    assert logits.isfinite().all()
