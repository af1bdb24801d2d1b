"""The forms of a row: which of its fields holds the conversation, and what stands beside it.

Four forms, here the same conversation:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"data": ["Hi", "Hello"]}                                              UltraChat's list
    {"text": "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n"}
    {"input_ids": [1, 4093, …], "loss_mask": [0, 0, …, 1, 1]}               tokens
"""

from treespec.errors import InputError

TURNS = ("conversations", "messages", "conversation", "data")  # fields that hold a list of turns
TEXT = "text"
TOKENS = "input_ids"
MASKS = ("loss_mask", "assistant_masks", "labels")  # which tokens of `input_ids` count
FORMS = dict.fromkeys((*TURNS, TEXT, TOKENS))  # in the order in which they are looked for
IDS = ("id", "conversation_id", "prompt_id", "question_id")
WITH_ROWS = (*MASKS, *IDS, "attention_mask", "tools", "ended")  # further fields that are read


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count its reason and show its detail."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
