"""A conversation with a target: its messages, the `Spec` that answers, and its slash commands."""

import difflib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from treespec.api.spec import Spec
from treespec.cli.answer import ChatConfig
from treespec.decoding.stats import Stats, figures_of
from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.requests.output import Output, Stream
from treespec.text.conversations import read_conversations
from treespec.text.strings import one_line
from treespec.trees.policy import FORMS
from treespec.verify.facts import NAMES

SETTINGS = {  # options that a command of their name sets, and values to complete
    "system": ("none",),
    "temperature": ("0", "0.6", "1"),
    "top_k": ("0", "50"),
    "top_p": ("0.9", "1"),
    "min_p": ("0", "0.1"),
    "repetition_penalty": ("1", "1.1"),
    "presence_penalty": ("0", "1"),
    "frequency_penalty": ("0", "1"),
    "max_new_tokens": ("128", "512", "2048"),
    "seed": ("none", "0"),
}
TREES = ("default", "dynamic", "sampled", "eagle", "chain:5", "2x4")
Message = dict[str, Any]  # role, content, and `interrupted` where Ctrl-C cut the answer short


@final
@dataclass
class Conversation:
    """messages: the turns that were answered. unanswered: the last message, if it has no answer.

    answers, total: count and figures of all answers, replaced ones included.
    """

    spec: Spec
    config: ChatConfig
    colour: bool = True
    messages: list[Message] = field(default_factory=list)
    unanswered: str | None = None
    answers: int = 0
    total: Stats = field(default_factory=Stats)

    @property
    def last_message(self) -> str:
        """The message that a retry answers. Raises InputError where nothing was asked."""
        if self.unanswered is None and not self.messages:
            raise InputError("nothing has been asked yet")
        return self.messages[-2]["content"] if self.unanswered is None else self.unanswered

    @property
    def last_answer(self) -> str | None:
        return self.messages[-1]["content"] if self.messages and self.unanswered is None else None

    def ask(self, text: str, again: bool = False) -> Stream:
        """The answer to come. Only `keep` remembers it. Raises InputError as `Spec.stream` does.

        again: the answer replaces the last one.
        """
        messages = [*opening(self.config), *self._before(again), message("user", text)]
        prompt = [message(said["role"], said["content"]) for said in messages]
        return self.spec.stream(prompt, **self.config.requested)

    def keep(self, text: str, output: Output, interrupted: bool, again: bool = False) -> bool:
        """Remember a turn, unless the answer is empty: templates have no place for that."""
        self.total.add(output.stats)
        said = output.text.strip()
        if said:
            reply = message("assistant", said) | ({"interrupted": True} if interrupted else {})
            self.messages = [*self._before(again), message("user", text), reply]
            self.unanswered = None
            self.answers += 1
        elif not again:
            self.unanswered = text
        return bool(said)

    def _before(self, again: bool) -> list[Message]:
        """The messages before the one to answer."""
        return self.messages[:-2] if again and self.unanswered is None else self.messages

    def change(self, **options: Any) -> None:
        """Use other options of `ChatConfig` from the next answer on.

        Raises InputError or TreeError, and then changes nothing.
        """
        config = replace(self.config, **options)
        if config.system != self.config.system:
            self.spec.encode([*opening(config), message("user", "Hello")])
        if {"tree", "verifier"} & options.keys():
            if self.spec.source is None:
                raise InputError(
                    "nothing is drafted without a head: start again with --head or --drafter"
                )
            self.spec = self.spec.configured(config.tree, config.verifier, config.allow_lossy)
        self.config = config

    def drafting(self) -> str:
        if self.spec.source is None:
            return "no head: one token at a time"
        verifier = self.config.verifier
        if verifier == "auto":
            verifier = self.spec.verifier.name  # another one where auto does not fit the tree
        if self.spec.policy is None:
            return f"verifier {verifier}, drafts by {self.config.drafter}"
        named, own = self.config.tree, f"{self.spec.policy!s} by default"
        return f"verifier {verifier}, {f'tree {named}' if named else own}"


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def opening(config: ChatConfig) -> list[Message]:
    return [message("system", config.system)] if config.system else []


class Question(NamedTuple):
    """A message for the target to answer again, instead of the last answer."""

    text: str


class Command(NamedTuple):
    """run: (conversation, value) -> text to show, or a question to answer.

    value: placeholder in the help, "" for a command without a value. choices: for completion.
    """

    run: Callable[[Conversation, str], str | Question]
    help: str
    value: str = ""
    choices: tuple[str, ...] = ()


def run(conversation: Conversation, line: str) -> str | Question:
    """Run a line such as `/temperature 0.7`. The first letters of a command are enough.

    Returns text to show or a question to answer. Raises InputError for a line that cannot be run,
    and EOFError at the end of the conversation.
    """
    name, value = [*line.strip().split(maxsplit=1), ""][:2]
    names = [name] if name in COMMANDS else [known for known in COMMANDS if known.startswith(name)]
    if len(names) != 1:
        close = names or difflib.get_close_matches(name, COMMANDS)
        hint = f"did you mean {' or '.join(close)}?" if close else "/help lists the commands"
        raise InputError(f"unknown command {name}: {hint}")
    command = COMMANDS[names[0]]
    if value and not command.value:
        raise InputError(f"{names[0]} takes no value")
    return command.run(conversation, value)


def in_words(error: Exception) -> str:
    """An error's line, naming slash commands instead of command-line options."""
    return re.sub(rf"--(?=({'|'.join(COMMANDS).replace('/', '')})\b)", "/", str(error))


def setting(name: str) -> Command:
    """The command that shows and sets an option."""
    known = next(known for known in fields(ChatConfig) if known.name == name)
    called, choices = name.replace("_", "-"), SETTINGS[name]
    kind: Any = next((k for k in (int, float) if known.type in (k, k | None)), str)

    def run(conversation: Conversation, value: str) -> str:
        try:
            chosen = None if value == "none" and known.default is None else kind(value or 0)
        except ValueError:
            example = f"/{called} {choices[-1]}"
            raise InputError(f"{called} {value!r} is not a number such as {example}") from None
        if value:
            conversation.change(**{name: chosen})
        now = getattr(conversation.config, name)
        return f"{called} {now:g}" if isinstance(now, float) else f"{called} {now or 'none'}"

    return Command(run, known.metadata["help"], "TEXT" if kind is str else "N", choices)


def drafting(option: str, values: str) -> Callable[[Conversation, str], str]:
    """What shows and sets the verifier or the tree. values: those that there are, as text."""

    def run(conversation: Conversation, value: str) -> str:
        if not value:
            return f"{conversation.drafting()}; there are {values}"
        conversation.change(**{option: {"default": getattr(ChatConfig, option)}.get(value, value)})
        return conversation.drafting()

    return run


def reset(conversation: Conversation, _: str) -> str:
    vars(conversation).update(messages=[], unanswered=None, answers=0, total=Stats())
    return "a new conversation"


def undo(conversation: Conversation, _: str) -> str:
    """Forget the last turn, or the last message if it has no answer."""
    forgotten = conversation.last_message
    if conversation.unanswered is None:
        conversation.messages = conversation.messages[:-2]
    conversation.unanswered = None
    return f"forgotten: {one_line(forgotten)}"


def stats(conversation: Conversation, _: str) -> str:
    total, answers = conversation.total, conversation.answers
    if not total.cycles:
        raise InputError("nothing has been answered yet")
    whole = total.seconds["total"]
    share = {stage: f"{stage} {seconds / whole:.0%}" for stage, seconds in total.seconds.items()}
    share["draft"] += f" ({share['head']})"
    shares = ", ".join(share[s] for s in ("prefill", "draft", "target", "verify", "commit"))
    rates = " ".join(f"{rate:.2f}" for rate in total.acceptance_by_depth)
    return (
        f"{answers} {'answer' if answers == 1 else 'answers'} · {figures_of(total, explain=True)} · "
        f"{total.cycles} cycles\n"
        f"α by depth (accepted, of what was reached): {rates or 'nothing drafted'}\n"
        f"time: {whole:.1f} s, of it {shares}"
    )


def save(conversation: Conversation, value: str) -> str:
    """Append the conversation as a line of JSON, which `treespec train --data` reads."""
    if not value:
        raise InputError("where to? /save FILE")
    if not conversation.messages:
        raise InputError("nothing has been said yet")
    path = Path(value).expanduser().resolve()
    messages = [*opening(conversation.config), *conversation.messages]
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    with writing(path) as temporary:
        before = path.read_bytes() if path.exists() else b""
        before = before and before.rstrip(b"\n") + b"\n"
        temporary.write_bytes(before + line.encode() + b"\n")
        if before:
            shutil.copymode(path, temporary)
    return f"saved to {path}"


def load(conversation: Conversation, value: str) -> str:
    """Go on with the last conversation of a file, such as `/save` writes."""
    if not value:
        raise InputError("from where? /load FILE")
    path = Path(value).expanduser()
    if not path.is_file():
        raise InputError(f"no file at {path}")
    messages = read_conversations(path)[0][-1].messages
    if not messages or any(said["role"] == "tool" for said in messages):
        raise InputError(f"the last conversation in {path} is not of user and assistant alone")
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    conversation.change(system=system)
    reset(conversation, "")
    spoken = messages if system is None else messages[1:]
    conversation.messages = [message(said["role"], said["content"]) for said in spoken]
    return f"goes on after: {one_line(conversation.last_message)}"


def colour(conversation: Conversation, _: str) -> str:
    conversation.colour = not conversation.colour
    return f"drafted tokens {'are marked' if conversation.colour else 'look like all others'}"


def show_help(_: Conversation, __: str) -> str:
    lines = [f"{f'{name} {known.value}':<22} {known.help}" for name, known in COMMANDS.items()]
    keys = "Alt-Enter breaks a line, Ctrl-C stops an answer, Ctrl-D quits. //x sends /x."
    return "\n".join([*lines, keys])


def leave(_: Conversation, __: str) -> str:
    raise EOFError


COMMANDS = {
    "/reset": Command(reset, "forget what was said"),
    "/undo": Command(undo, "forget the last message and its answer"),
    "/retry": Command(lambda said, _: Question(said.last_message), "answer the last message again"),
    **{f"/{name.replace('_', '-')}": setting(name) for name in SETTINGS},
    "/verifier": Command(
        drafting("verifier", ", ".join(NAMES)), "how drafted tokens are verified", "NAME", NAMES
    ),
    "/tree": Command(
        drafting("tree", f"default, {FORMS}"), "shape of the drafted tree", "SPEC", TREES
    ),
    "/stats": Command(stats, "acceptance and time of the conversation"),
    "/save": Command(save, "append the conversation as a line of JSON", "FILE"),
    "/load": Command(load, "go on with the last conversation of such a file", "FILE"),
    "/colour": Command(colour, "mark drafted tokens, or do not"),
    "/help": Command(show_help, "this list"),
    "/quit": Command(leave, "end"),
}
