"""A conversation with a target, and the slash commands that change it."""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from treespec.cli.chat import ChatConfig
from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.spec import Output, Spec, Stream
from treespec.stats import Stats
from treespec.trees.policy import FORMS
from treespec.verify.verifiers import NAMES


@final
@dataclass
class Conversation:
    """What answers, what was said, and what it cost. An answer that was cut short says `interrupted`."""

    spec: Spec
    config: ChatConfig
    colour: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)
    total: Stats = field(default_factory=Stats)

    @property
    def opening(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.config.system}] if self.config.system else []

    def ask(self, text: str) -> Stream:
        """The answer to come; nothing is remembered before `keep`. Raises InputError as `Spec.stream` does."""
        prompt = [*self.opening, *self.messages, {"role": "user", "content": text}]
        return self.spec.stream(prompt, **self.config.sampling(len(self.messages)))

    def keep(self, text: str, output: Output, interrupted: bool) -> bool:
        """Remember a turn, unless nothing was answered: templates have no place for an empty answer."""
        self.total.add(output.stats)
        said = output.text.strip()
        if said:
            mark = {"interrupted": True} if interrupted else {}
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said} | mark]
        return bool(said)

    def configure(self, tree: str | None, verifier: str) -> str:
        """Another tree and verifier from the next answer on. A pair that is refused changes nothing."""
        if self.spec.source is None:
            raise InputError("nothing is drafted without a head: start again with --head or --drafter")
        self.spec = self.spec.configured(tree, verifier, self.config.allow_lossy)
        self.config = replace(self.config, tree=tree, verifier=verifier)
        return self.drafting()

    def drafting(self) -> str:
        if self.spec.source is None:
            return "no head: one token at a time"
        drafts = f"tree {self.config.tree or 'default'}" if self.spec.policy else f"drafts by {self.config.drafter}"
        return f"verifier {self.config.verifier}, {drafts}"


@final
@dataclass(frozen=True)
class Command:
    """run: (conversation, value) -> what to show. value: how the help names it. choices: for completion."""

    run: Callable[[Conversation, str], str]
    help: str
    value: str = ""
    choices: tuple[str, ...] = ()


def run(conversation: Conversation, line: str) -> str:
    """Run a line such as `/temperature 0.7`; a command's first letters will do. Returns what to show.

    Raises InputError for what cannot be done, and EOFError at the end of the conversation.
    """
    name, _, value = line.strip().partition(" ")
    names = [name] if name in COMMANDS else [known for known in COMMANDS if known.startswith(name)]
    if len(names) != 1:
        close = names or difflib.get_close_matches(name, COMMANDS)
        hint = f"did you mean {' or '.join(close)}?" if close else "/help lists the commands"
        raise InputError(f"unknown command {name}: {hint}")
    command, value = COMMANDS[names[0]], value.strip()
    if value and not command.value:
        raise InputError(f"{names[0]} takes no value")
    return command.run(conversation, value)


def reset(conversation: Conversation, _: str) -> str:
    conversation.messages, conversation.total = [], Stats()
    return "a new conversation"


def temperature(conversation: Conversation, value: str) -> str:
    if value:
        try:
            number = float(value)
        except ValueError:
            raise InputError(f"temperature {value!r} is not a number: /temperature 0.7") from None
        SamplingParams(number)
        conversation.config = replace(conversation.config, temperature=number)
    return f"temperature {conversation.config.temperature:g}"


def verifier(conversation: Conversation, value: str) -> str:
    if value:
        return conversation.configure(conversation.config.tree, value)
    return f"{conversation.drafting()}; there are {', '.join(NAMES)}"


def tree(conversation: Conversation, value: str) -> str:
    if value:
        return conversation.configure(None if value == "default" else value, conversation.config.verifier)
    return f"{conversation.drafting()}; there are default, {FORMS}"


def stats(conversation: Conversation, _: str) -> str:
    total, answers = conversation.total, len(conversation.messages) // 2
    if not total.cycles:
        raise InputError("nothing has been answered yet")
    whole, split = total.seconds["total"], []
    for stage in ("prefill", "draft", "target", "verify", "commit"):
        share = f"{stage} {total.seconds[stage] / whole:.0%}"
        split.append(share + (f" (head {total.seconds['head'] / whole:.0%})" if stage == "draft" else ""))
    rates = " ".join(f"{rate:.2f}" for rate in total.acceptance_by_depth)
    return "\n".join(
        [
            f"{answers} {'answer' if answers == 1 else 'answers'}, {total.new_tokens} tokens in "
            f"{total.cycles} cycles, τ {total.acceptance_length:.2f}, {total.tokens_per_second:.1f} tokens/s",
            f"α by depth: {rates or 'nothing drafted'}",
            f"time: {whole:.1f} s, of it {', '.join(split)}",
        ]
    )


def save(conversation: Conversation, value: str) -> str:
    """One line of JSON a conversation, as `treespec train --data` reads it."""
    if not value:
        raise InputError("where to? /save FILE")
    if not conversation.messages:
        raise InputError("nothing has been said yet")
    messages = conversation.opening + conversation.messages
    path = Path(value).expanduser().resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file")
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        temporary.write_bytes(before + json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n")
        if before:
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot save to {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return f"saved to {path}"


def colour(conversation: Conversation, _: str) -> str:
    conversation.colour = not conversation.colour
    return f"drafted tokens {'have a colour' if conversation.colour else 'look like all others'}"


def show_help(_: Conversation, __: str) -> str:
    usage = {f"{name} {command.value}": command.help for name, command in COMMANDS.items()}
    lines = [f"{line:<18} {text}" for line, text in usage.items()]
    return "\n".join([*lines, "Alt-Enter breaks a line, Ctrl-C stops an answer, Ctrl-D quits."])


def leave(_: Conversation, __: str) -> str:
    raise EOFError


COMMANDS = {
    "/reset": Command(reset, "forget what was said"),
    "/temperature": Command(temperature, "0 is greedy", "X"),
    "/verifier": Command(verifier, "how drafted tokens are verified", "NAME", NAMES),
    "/tree": Command(tree, "what is drafted", "SPEC", ("default", "dynamic", "sampled", "eagle", "chain:5", "2x4")),
    "/stats": Command(stats, "acceptance and time of the conversation"),
    "/save": Command(save, "append the conversation as a line of JSON", "FILE"),
    "/colour": Command(colour, "drafted tokens in a colour of their own, or not"),
    "/help": Command(show_help, "this list"),
    "/quit": Command(leave, "end"),
}


def figures(stats: Stats) -> str:
    """The line after an answer."""
    return (
        f"{stats.new_tokens} tokens · τ {stats.acceptance_length:.2f} · {stats.tokens_per_second:.1f} tokens/s"
        f" · {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused"
    )


def in_words(error: Exception) -> str:
    """An error's line, with slash commands where it names options of the command line."""
    return re.sub(r"--(?=(tree|verifier|temperature)\b)", "/", str(error))
