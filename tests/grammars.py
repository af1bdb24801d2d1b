"""A target of six tokens with a tokenizer, and the law of its answers under a grammar by enumeration."""

import math

import torch
from models import TableConfig, TableModel, random_head
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.shaping.sampling import probs

TOKENS = ["a", "b", "c", "ab", "</s>", "d"]
END = 4


def letters_tokenizer():
    words = Tokenizer(BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


def letters_spec():
    model = Target(TableModel(TableConfig(len(TOKENS), seed=1, eos_token_id=END)), letters_tokenizer())
    return Spec(model, random_head(model, seed=2))


def by_words(words):
    """The tokens by which an answer stays the beginning of one of the words."""

    def allowed(answer):
        text = "".join(TOKENS[token] for token in answer)
        following = {i for i, token in enumerate(TOKENS) if any(word.startswith(text + token) for word in words)}
        return following | ({END} if text in words else set())

    return allowed


def law_of_answers(model, prompt, allowed, params):
    """{answer: probability}: forbidden tokens have none, and the rest are scaled to 1, token by token."""
    laws: dict[tuple[int, ...], float] = {}

    def walk(answer, chance):
        if answer and answer[-1] == END:
            laws[answer] = chance
            return
        logits = model.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double()
        forbidden = [token for token in range(len(TOKENS)) if token not in allowed(answer)]
        logits[forbidden] = -math.inf
        for token, p in enumerate(probs(logits, params).tolist()):
            if p:
                walk((*answer, token), chance * p)

    walk((), 1.0)
    return laws
