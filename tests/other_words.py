"""Tokenizers that cut the same text differently: byte-level BPE, and SentencePiece's form with byte fallback."""

import json

import transformers as hf
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

TEXTS = ["the user asks and the assistant answers the question, the answer is short"] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(vocab_size=340, texts=TEXTS, specials=("<pad>", "<bos>", "<eos>")):
    """`▁` stands for a space, `<0x0A>` for a byte; every text begins with <bos>."""
    # 1. Merges, learned from some words.
    model = Tokenizer(BPE())
    model.normalizer = normalizers.Replace(" ", "▁")
    model.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 256, special_tokens=[*specials], show_progress=False)
    model.train_from_iterator(texts, trainer)

    # 2. The same with a token for each byte.
    learned = json.loads(model.to_str())["model"]
    vocab = learned["vocab"] | {byte: len(learned["vocab"]) + row for row, byte in enumerate(BYTES)}
    model.model = BPE(vocab=vocab, merges=[tuple(pair) for pair in learned["merges"]], byte_fallback=True)
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    begins = [("<bos>", vocab["<bos>"])]
    model.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=begins)
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def without_shared_tokens():
    """A byte-level tokenizer of symbols that no text of the others holds."""
    model = Tokenizer(BPE(vocab={"\u4e00": 0, "\u4e01": 1}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return hf.PreTrainedTokenizerFast(tokenizer_object=model)
