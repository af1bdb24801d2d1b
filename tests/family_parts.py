"""What families of chat models are made of: a tokenizer of all their special tokens, and parts of templates."""

from dataclasses import dataclass
from typing import Any

from chat_templates import each
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
SPECIAL = [
    *("<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    *("<|think|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|endoftext|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *(
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "[gMASK]",
        "<sop>",
    ),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
]


def family_tokenizer(template=None):
    """One token a byte, but for the special tokens of all families: a text has one form as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=False) for name in PLAIN])
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True)
class Said:
    """What an answer consists of. call: the argument of a call of `look`. thinks: whether the model does at all."""

    thought: str = ""
    content: str = ""
    call: str = ""
    thinks: bool = False


@dataclass(frozen=True)
class Family:
    """write: what the model adds to a prompt. kinds: of conversations beside plain ones that it has."""

    template: str
    write: Any
    kinds: tuple[str, ...] = ()

    def written(self, said, before):
        """What the model writes behind a prompt, which may have opened its thought."""
        text = self.write(said)
        opened = max((o for o in ("<think>\n", "<|channel>thought\n") if before.endswith(o)), key=len, default="")
        return text.removeprefix(opened)


CALLS = ("calls",)
BOTH = ("thoughts", "calls", "thoughts and calls")
IS = "m['role'] == '{}'".format
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
NO_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"


def each_call(body):
    return "{% for c in m['tool_calls'] or [] %}" + body + "{% endfor %}"


def turns(assistant, tool="", other="{{ m['content'] }}"):
    """A turn of each kind."""
    return each(
        f"{{% if {IS('assistant')} %}}{assistant}{{% elif {IS('tool')} %}}{tool}{{% else %}}{other}{{% endif %}}"
    )


def closed_by(end):
    """A model that neither thinks nor calls."""
    return lambda said: said.content + end
