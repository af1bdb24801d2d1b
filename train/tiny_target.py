"""A small target model of our own: a tokenizer and a Llama, trained on the spot within a given time."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
import os
import json
from pathlib import Path
from collections.abc import Iterable, Iterator, Sequence

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = 'A chat about Python.' %}{% endif %}"
    "{{ '<s>' + system }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] + ' ASSISTANT:' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + '</s>' }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(out: Path, texts: Iterable[str], vocab: int) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return out
