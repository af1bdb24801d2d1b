"""Small random models of many architectures, and one whose next-token law is a table."""

import json
from functools import cache
from typing import ClassVar

import torch
import transformers as hf
from equality import seeded
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from treespec.draft.heads.loading import new_head
from treespec.draft.vocabulary import restrict
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.sampling.sampler import Distribution

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

CANNOT_BRANCH = {
    "bloom": (lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
    "falcon-alibi": (
        lambda: hf.FalconConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        "ALiBi",
    ),
    "gpt-neo": (
        lambda: hf.GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]]
        ),
        "local attention",
    ),
}


def random_model(config, seed=0, spread=0.1):
    """A model of that architecture whose logits are far from flat, so that a wrong mask shows.

    The vectors of norms and biases are random too, so that one in another's place shows. spread: of these
    numbers; 0 leaves the vectors as a new model has them.
    """
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
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
def target(name):
    return Target(random_model(CONFIGS[name]()))


def small(seed=5, **changes):
    """A Llama of one layer."""
    return Target(random_model(hf.LlamaConfig(**GROUPED | {"num_hidden_layers": 1} | changes), seed))


def prompt(length=7, seed=3):
    return torch.randint(3, VOCAB, (length,), generator=seeded(seed)).tolist()


def plain_generate(target, ids, new):
    """What transformers' greedy generate says after a prompt."""
    out = target.model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def as_undrafted(spec, prompts, new, **options):
    """The greedy completions of several prompts: drafts change no token of each alone."""
    outputs = spec.generate(prompts, max_new_tokens=new, **options)
    plain = spec.baseline()
    alone = [plain.generate(one, max_new_tokens=new).token_ids for one in prompts]
    assert [output.token_ids for output in outputs] == alone
    return outputs


def what(outputs):
    """The tokens of each completion, and how many drafts each of its cycles accepted."""
    return [(output.token_ids, output.stats.accepted) for output in outputs]


def random_head(target, seed=0):
    torch.manual_seed(seed)
    return new_head("eagle", target).eval()


def random_eagle3(target, seed=0, drafted=None):
    """drafted: [Vd] the tokens that it drafts, None is all."""
    torch.manual_seed(seed)
    head = new_head("eagle3", target).eval()
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
        self.table = nn.Parameter(1.5 * torch.randn(v, v, v, generator=generator))
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
    """A decoder of a few tokens whose next-token law is a table over the last two tokens."""

    config_class = TableConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = TableDecoder(config)
        self.embed = nn.Embedding(config.vocab_size, config.vocab_size)
        nn.init.normal_(self.embed.weight, generator=seeded(config.seed))
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
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
    return drafter.draft_trees(root, [Distribution(params)], [generator], TreeCache(layers=1))[0]


CHAT = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def tokenizer(vocab_size=320):
    """A byte-level tokenizer with a chat template: <pad> 0, <s> 1, </s> 2."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the user asks and the assistant answers the question"] * 4, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT
    )


def save_model(folder, **changes):
    """A real directory that transformers loads: a random Llama of 3 layers with the tokenizer above."""
    words = tokenizer()
    config = hf.LlamaConfig(**GROUPED | {"vocab_size": len(words), "max_position_embeddings": 512} | changes)
    random_model(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def change(folder, file="config.json", **fields):
    """Set fields of a JSON file; None deletes one."""
    whole = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))


def hollow_model(folder):
    """As `save_model`, with a file of weights that holds none: loading it is an error."""
    save_file({}, save_model(folder) / "model.safetensors")
    return folder
