"""Chat templates as models ship them, each with the same conversations cut into segments by hand."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from treespec.text.encoding import encode_conversations
from treespec.text.entries import Conversation

SENTENCES = [
    "A chat between a curious user and an assistant. USER: Why is the sky blue? ASSISTANT: Because.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "system user assistant model Instruction Response",
] * 3

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]


def byte_tokenizer(template=None, *, trim_offsets=True, post="", **added):
    """Byte-level BPE; post: what the tokenizer itself puts around a text; added: flags of <|head|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, **(added if name == "<|head|>" else {})) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    stages = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if post:
        ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        stages.append(processors.TemplateProcessing(single=post, special_tokens=ids))
    backend.post_processor = processors.Sequence(stages)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def each(body):
    return "{% for m in messages %}" + body + "{% endfor %}"


def prompt(text):
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


# Every template twice: as models publish it, and by hand: what stands before a turn, what is the answer with
# its end marker if the turn is an assistant's, and what stands after it. The expected mask is read off the
# second. r: s(ystem), u(ser) or a(ssistant); c: the content; last: whether it is the last turn.
LLAMA3 = (
    "{{ '<|begin|>' }}"
    + each("{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}")
    + prompt("<|head|>assistant<|/head|>\\n\\n")
)
CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
CHATML = each(CHATML_TURN) + prompt("<|im_start|>assistant\\n")
VICUNA = "{{ '<s>' }}" + each(
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}"
) + prompt(" ASSISTANT:")  # fmt: skip
MISTRAL = "{{ '<s>' }}" + each(
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}"
)  # fmt: skip
ALPACA = each(
    "{% if m['role'] == 'assistant' %}{{ '### Response:\\n' + m['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + m['content'] + '\\n\\n' }}{% endif %}"
) + prompt("### Response:\\n")  # fmt: skip
FALCON = each(
    "{{ 'User: ' if m['role'] == 'user' else 'Assistant: ' if m['role'] == 'assistant' else '' }}"
    "{{ m['content'].replace('\\n\\n', '\\n') + '\\n\\n' }}"
) + prompt("Assistant:")  # fmt: skip
GENERATION = each(
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}"
) + prompt("<|im_start|>assistant\\n")  # fmt: skip
# An old form of Qwen3's: the last answer gets an empty thought, earlier ones lose theirs.
THINKING = each(
    "{% set said = m['content'].split('</think>')[-1].lstrip() %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ said + '<|im_end|>\\n' }}"
) + prompt("<|im_start|>assistant\\n")  # fmt: skip
# DeepSeek-R1's: the prompt opens a thought that finished answers are shown without.
OPENED = each(
    "{% if m['role'] == 'assistant' %}{{ '<|head|>' + m['content'].split('</think>')[-1] + '<|eot|>' }}"
    "{% else %}{{ '<|begin|>' + m['content'] }}{% endif %}"
) + prompt("<|head|><think>\\n")  # fmt: skip
# gpt-oss': the last answer ends with a token of its own, and the model writes a channel before it.
CHANNEL = each(
    "{{ '<|begin|>' + m['role'] }}{% if m['role'] == 'assistant' %}"
    "{{ '<|head|>final<|/head|>' + m['content'] + ('<|eot|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|/head|>' + m['content'] + '<|im_end|>' }}{% endif %}"
) + prompt("<|begin|>assistant")  # fmt: skip

ROLE = {"s": "system", "u": "user", "a": "assistant"}


def chatml(r, c, last):
    return f"<|im_start|>{ROLE[r]}\n", c + "<|im_end|>", "\n"


def vicuna(r, c, last):
    return {"s": ("", c, ""), "u": (" USER: ", c, ""), "a": (" ASSISTANT:", f" {c}</s>", "")}[r]


def falcon(r, c, last):
    said = c.replace("\n\n", "\n") + "\n\n"
    return ("Assistant:", f" {said}", "") if r == "a" else ("User: " * (r == "u"), said, "")


def thinking(r, c, last):
    thought = "<think>\n\n</think>\n\n" * (r == "a" and last)
    return chatml(r, thought + c.split("</think>")[-1].lstrip(), last)


def channels(r, c, last):
    if r == "a":
        return "<|begin|>assistant", f"<|head|>final<|/head|>{c}{'<|eot|>' if last else '<|im_end|>'}", ""
    return f"<|begin|>{ROLE[r]}<|/head|>", c + "<|im_end|>", ""


BY_HAND = {
    "llama3": (LLAMA3, "<|begin|>", lambda r, c, last: (f"<|head|>{ROLE[r]}<|/head|>\n\n", c.strip() + "<|eot|>", "")),
    "chatml": (CHATML, "", chatml),
    "headers without a generation prompt": (each(CHATML_TURN), "", chatml),
    "vicuna": (VICUNA, "<s>", vicuna),
    "mistral": (
        MISTRAL,
        "<s>",
        lambda r, c, last: ("", f" {c.strip()}</s>", "") if r == "a" else ("[INST] ", c, " [/INST]"),
    ),
    "alpaca, no special token": (
        ALPACA,
        "",
        lambda r, c, last: (f"### {'Response' if r == 'a' else 'Instruction'}:\n", f"{c}\n\n", ""),
    ),
    "falcon, rewrites line breaks": (FALCON, "", falcon),
    "generation blocks": (GENERATION, "", chatml),
    "thinking": (THINKING, "", thinking),
    "opened thought": (
        OPENED,
        "",
        lambda r, c, last: ("<|head|>", c.split("</think>")[-1] + "<|eot|>", "") if r == "a" else ("<|begin|>", c, ""),
    ),
    "channels": (CHANNEL, "", channels),
}

CONVERSATIONS = {
    "one turn": ["u Why is the sky blue?", "a Because."],
    "three turns": ["u Hello", "a Hello", "u Hello", "a Hello", "u Hello", "a Hello again"],
    "system": ["s You are terse.", "u Sing 🎵 of Zürich", "a 🎵 Zürich, 日本 🎵", "u More", "a No 🎵"],
    "spaces": ["u  x \n", "a \n  7 is\n\n\nprime  ", "u 7", "a 7", "u \n", "a 12 "],
    "words of the header": ["u user", "a a", "u assistant", "a assistant", "u Response:", "a s"],
    "thoughts": ["u 1+1?", "a <think>Easy.</think>2", "u 2+2?", "a <think>Hm, 2?</think>4"],
}


def turns(conversation):
    return [{"role": ROLE[turn[0]], "content": turn[2:]} for turn in conversation]


def segments(by_hand, conversation):
    _, first, turn = by_hand
    out = [(first, False)]
    for i, one in enumerate(conversation):
        before, middle, after = turn(one[0], one[2:], i == len(conversation) - 1)
        out += [(before, False), (middle, one[0] == "a"), (after, False)]
    return out


def rows_by_hand(name, conversation):
    """[[(text, whether it counts)]]: one row, or one an answer where the template shows earlier ones otherwise."""
    if name not in ("thinking", "channels", "opened thought"):
        return [segments(BY_HAND[name], conversation)]
    ends = [i for i, turn in enumerate(conversation) if turn[0] == "a"]
    if name == "opened thought" and "</think>" not in conversation[-1]:
        return [segments(BY_HAND[name], conversation)]
    rows = [segments(BY_HAND[name], conversation[: end + 1]) for end in ends]
    for row, end in zip(rows, ends, strict=True):
        answer, after = row[-2:]
        row[:-2] = [(text, False) for text, _ in row[:-2]]
        if name == "opened thought":  # the text as the target wrote it, behind the prompt that opens the thought
            written = conversation[end][2:].removeprefix("<think>") + "<|eot|>"
            row[-2:] = [("<think>\n", False), (written, True), after]
        else:
            row[-2:] = [answer, after]
    return rows


def encode_rows(tokenizer, messages, template=None, max_length=10_000):
    """The rows of one conversation as training has it."""
    return encode_conversations(tokenizer, [Conversation(messages)], template, max_length)[0]


def encode_conversation(tokenizer, messages, template=None, max_length=10_000):
    """One conversation that is one row."""
    (example,) = encode_rows(tokenizer, messages, template, max_length)
    return example
