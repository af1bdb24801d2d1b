"""What tests of conversations share: models on disk, what an answer shows, and a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

import torch
import transformers as hf
from models import GROUPED, random_model, tokenizer

from treespec.cli.answer import load_spec
from treespec.cli.chat import ChatConfig
from treespec.draft.heads.loading import new_head
from treespec.files.printable import printable
from treespec.heads.checkpoint import save_head

CONTEXT = 4096
PROMPT = "\x1b[?2004h"  # bracketed paste is switched on when a prompt is ready, and off when it is answered
ANSWERED = "\x1b[?2004l"


def save_models(folder):
    """A target and a head on disk. Warm answers are nearly uniform over tokens of which one in ten ends a text;

    sure ones never end, since those tokens are never the most likely.
    """
    words = tokenizer()
    ends = list(range(len(words) - 30, len(words)))
    config = hf.LlamaConfig(
        **GROUPED
        | {"vocab_size": len(words), "max_position_embeddings": CONTEXT, "eos_token_id": ends}
        | {"tie_word_embeddings": False}
    )
    model = random_model(config)
    with torch.no_grad():
        model.lm_head.weight[ends] = 0
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    torch.manual_seed(0)
    save_head(new_head("eagle", load_spec(ChatConfig(target=f"{folder}/target")).target), folder / "head")


def chat_config(folder):
    return ChatConfig(
        target=f"{folder}/target",
        head=f"{folder}/head",
        tree="dynamic:depth=2,topk=100,nodes=150",
        verifier="topk",
        temperature=100.0,
        max_new_tokens=3000,
        seed=6,
    )


def answer(conversation, text):
    """(what is shown of the next answer, its pieces), by the public API; the conversation goes on."""
    said = [*conversation.messages, {"role": "user", "content": text}]
    stream = conversation.spec.stream([*conversation.opening, *said], **conversation.config.requested)
    pieces = list(stream)
    conversation.messages = [*said, {"role": "assistant", "content": stream.output.text.strip()}]
    return printable(stream.output.text), pieces


class Terminal:
    """A process with a terminal of its own, and what it has written there."""

    def __init__(self, command, environment):
        self.process, self.screen = pty.fork()
        if not self.process:
            os.execve(command[0], command, environment)
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 250, 0, 0))
        self.written = b""

    def write(self, text):
        os.write(self.screen, text.encode())

    def until(self, pattern, seconds=120):
        """What was written up to the end of the next match, which is waited for."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern.encode(), self.written, re.DOTALL)):
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.written.decode(errors='replace')!r}"
            try:
                self.written += os.read(self.screen, 1 << 16)
            except OSError as error:  # the process has closed its side
                raise AssertionError(self.written.decode(errors="replace")) from error
        text = self.written[: found.end()]
        self.written = self.written[found.end() :]
        return text.decode(errors="ignore")  # the last character may not be there yet

    def say(self, line):
        """Type a line and return what it is answered with, up to the next prompt."""
        self.write(line + "\r")
        self.until(re.escape(ANSWERED))
        return self.until(re.escape(PROMPT)).replace("\r\n", "\n")

    def exit_code(self):
        while True:
            try:
                if not os.read(self.screen, 1 << 16):
                    break
            except OSError:
                break
        os.close(self.screen)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
