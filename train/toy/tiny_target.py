"""A small target of our own: a tokenizer and a Llama, trained on the spot within a given time."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from treespec.errors import InputError
from treespec.options import MANY, SEEDS, TOKENS, check_ranges, option
from treespec.train.toy.kept import kept, making
from treespec.train.toy.stdlib_text import TRAIN, read_messages

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% set system = 'A chat about Python.' %}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}"
    "{{ '<s>' + system }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}"
    "{% else %}{{ ' ASSISTANT:' }}"
    "{% generation %}{{ ' ' + message['content'] + '</s>' }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyTargetConfig:
    """Deep and narrow: a forward over 24 nodes costs little more than over one.

    For the last `long_share` of the time windows are `long_length` long, at the same number of
    tokens a step, so that the model learns dialogues. Raises InputError for a number out of its
    range.
    """

    layers: int = option("decoder layers", 12, least=1, most=1024)
    hidden: int = option("width of the hidden states", 192, least=1, most=65536)
    heads: int = option("attention heads", 3, least=1, most=1024)
    kv_heads: int = option("key-value heads", 1, least=1, most=1024)
    intermediate: int = option("width of an MLP", 512, least=1, most=TOKENS)
    vocab: int = option("tokens of the vocabulary, at most", 4096, least=1, most=TOKENS)
    context: int = option("context length", 2048, least=1, most=TOKENS)
    seconds: float = option(
        "seconds of training, without text and tokenizer", 200.0, above=0, most=MANY
    )
    batch: int = option("windows of `length` tokens a step", 8, least=1, most=65536)
    length: int = option("tokens of a window", 256, least=1, most=TOKENS)
    long_length: int = option("tokens of a window at the end", 1024, least=1, most=TOKENS)
    long_share: float = option("share of the time for long windows", 0.15, least=0, most=1)
    learning_rate: float = option("peak of AdamW's learning rate", 3e-3, least=0, most=10)
    warmup: float = option(
        "share of the time until the peak; a cosine follows", 0.1, least=0, most=1
    )
    beta1: float = option("AdamW", 0.9, least=0, below=1)
    beta2: float = option("AdamW", 0.95, least=0, below=1)
    weight_decay: float = option("AdamW", 0.1, least=0, most=100)
    max_grad_norm: float = option("largest norm of the gradient", 1.0, above=0, most=MANY)
    seed: int = option("seed of the weights and the order", 0, least=0, most=SEEDS)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")


@dataclass(frozen=True)
class Step:
    """One optimizer step: its number from 1, loss in nats per token, tokens seen, share of time."""

    number: int
    loss: float
    tokens: int
    progress: float


def train_target(
    out: Path,
    text: Path,
    config: TinyTargetConfig | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    console: Console | None = None,
) -> Path:
    """Train tokenizer and model on `text`, a directory of `make_text`; save both in `out`.

    A finished `out` is kept. It appears whole or, if anything raises, not at all. Raises InputError
    for a vocabulary or text that is too small, a training that diverges, and damage in what is
    there.
    """
    # 1. What is there, and what cannot be.
    if kept(out):
        return out
    config = config or TinyTargetConfig()
    if not 0 < config.seconds < math.inf:
        raise InputError(
            f"the target's training takes {config.seconds} seconds, must be a number above 0"
        )
    conversations = list(read_messages(text / TRAIN))
    with making(out) as unfinished:
        # 2. A tokenizer, and the text as tokens.
        contents = (message["content"] for messages in conversations for message in messages)
        tokenizer = train_tokenizer(unfinished, contents, config.vocab)
        apply = tokenizer.apply_chat_template
        rendered = [str(apply(messages, tokenize=False)) for messages in conversations]
        encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([token for ids in encoded for token in ids])
        if len(tokens) < 2 * max(config.length, config.long_length):
            raise InputError(
                f"{text / TRAIN} holds {len(tokens)} tokens, too few for windows of the length asked for"
            )

        # 3. The model.
        model = new_model(config, tokenizer)
        fit(model, tokens, config, on_step, console)
        model.set_attn_implementation("sdpa")
        model.save_pretrained(unfinished)
    return out


def train_tokenizer(out: Path, texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab` tokens with a chat template, saved in `out`.

    Raises InputError for a vocabulary that does not hold the bytes and the special tokens.
    """
    # 1. bytes and special tokens need their place
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD, BOS, EOS]
    if vocab < len(alphabet) + len(special):
        raise InputError(
            f"the vocabulary is {vocab}, must be at least {len(alphabet) + len(special)}"
        )

    # 2. the merges
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, special.index(BOS))]
    )

    # 3. the tokenizer as transformers loads it
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(out)
    return tokenizer


def new_model(config: TinyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights in `fast_dtype()`, embedding and output tied."""
    # 1. the shape
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )

    # 2. random weights; those that add to the residual start smaller, as in GPT-2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # over short windows the backward of eager attention is the faster one on a CPU
        model = AutoModelForCausalLM.from_config(
            shape, dtype=fast_dtype(), attn_implementation="eager"
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_(math.sqrt(2 * config.layers))
    return model


def fast_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it faster than float32."""

    def seconds(dtype: torch.dtype) -> float:
        x, w, times = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype), []
        for _ in range(8):
            begin = time.perf_counter()
            x @ w
            times.append(time.perf_counter() - begin)
        return min(times)

    return torch.bfloat16 if seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32


def fit(
    model: LlamaForCausalLM,
    tokens: Tensor,
    config: TinyTargetConfig,
    on_step: Callable[[Step], None],
    console: Console | None,
) -> None:
    """AdamW on float32 copies of the weights until the time is up. tokens: [M] int64."""
    # 1. float32 copies, their optimizer, and windows of the text
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in masters if w.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [w for w in masters if w.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    generator = torch.Generator().manual_seed(config.seed)
    short = windows(tokens, config.length, generator)
    long = windows(tokens, config.long_length, generator)
    per_step = config.batch * config.length

    # 2. steps until the time is up: forward, backward, update the copies, copy them back
    model.train()
    with _bar(console) as bar:
        total = config.seconds
        task = bar.add_task("target", total=total, loss=math.nan, speed=0.0, left=total)
        begin, number, seen, progress = time.monotonic(), 0, 0, 0.0
        while progress < 1:
            late = progress >= 1 - config.long_share
            rows = max(1, per_step // config.long_length) if late else config.batch
            batch = torch.stack([next(long if late else short) for _ in range(rows)])  # [B, T + 1]
            hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden).float().flatten(0, 1)  # [B * T, V]
            loss = F.cross_entropy(logits, batch[:, 1:].flatten())
            mean = loss.item()
            if not math.isfinite(mean):
                raise InputError(
                    f"the target's training diverged at step {number + 1}: its loss is {mean}"
                )
            loss.backward()
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * schedule(progress, config.warmup)
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
            elapsed = time.monotonic() - begin
            number, seen = number + 1, seen + batch[:, 1:].numel()
            progress, left = elapsed / config.seconds, max(0.0, config.seconds - elapsed)
            bar.update(task, completed=elapsed, loss=mean, speed=seen / elapsed, left=left)
            on_step(Step(number, mean, seen, progress))
    model.eval()


def windows(tokens: Tensor, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows of length + 1 without end. Each epoch has another offset and another order."""
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        count = (len(tokens) - 1 - offset) // length
        for i in torch.randperm(count, generator=generator).tolist():
            yield tokens[offset + i * length :][: length + 1]


def schedule(progress: float, warmup: float) -> float:
    """The factor of the learning rate: linear warm-up, then half a cosine to 0 at progress 1."""
    if progress < warmup:
        return max(progress, 0.01 * warmup) / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def _bar(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "loss {task.fields[loss]:.2f}  {task.fields[speed]:,.0f} tokens/s  {task.fields[left]:.0f} s left"
        ),
        console=console,
    )
