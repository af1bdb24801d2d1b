"""A conversation with a target: its messages, the `Spec` that answers, and its figures."""

from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict, final

from treespec.api.spec import Spec
from treespec.cli.config import ChatConfig
from treespec.decoding.stats import Stats
from treespec.errors import InputError
from treespec.requests.output import Output, Stream

HINTS = "/help: commands · Alt-Enter: new line · Ctrl-C: stop an answer · Ctrl-D: quit"


class Message(TypedDict):
    """interrupted: present where Ctrl-C cut the answer short."""

    role: str
    content: str
    interrupted: NotRequired[bool]


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
    def opening(self) -> list[Message]:
        return opening(self.config.system)

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
        prompt = plain([*self.opening, *self._before(again), Message(role="user", content=text)])
        return self.spec.stream(prompt, **self.config.requested)

    def keep(self, text: str, output: Output, interrupted: bool, again: bool = False) -> bool:
        """Remember a turn, unless the answer is empty: templates have no place for that."""
        self.total.add(output.stats)
        said = output.text.strip()
        if said:
            reply = Message(role="assistant", content=said)
            if interrupted:
                reply["interrupted"] = True
            self.messages = [*self._before(again), Message(role="user", content=text), reply]
            self.unanswered = None
            self.answers += 1
        elif not again:
            self.unanswered = text
        return bool(said)

    def reset(self) -> None:
        self.messages, self.unanswered, self.answers, self.total = [], None, 0, Stats()

    def undo(self) -> None:
        """Forget the last turn, or the last message if it has no answer."""
        if self.unanswered is None:
            self.messages = self.messages[:-2]
        self.unanswered = None

    def resume(self, messages: list[Message]) -> None:
        """Go on after these messages, of which a system message may be the first."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.change(system=system)
        self.reset()
        self.messages = messages[1:] if system is not None else messages

    def change(self, **options: Any) -> None:
        """Use other options of `ChatConfig` from the next answer on.

        Raises InputError, and then changes nothing.
        """
        config = replace(self.config, **options)
        if config.system != self.config.system:
            hello = Message(role="user", content="Hello")
            self.spec.encode(plain([*opening(config.system), hello]))
        self.config = config

    def configure(self, tree: str | None, verifier: str) -> str:
        """Use another tree and verifier from the next answer on. A refused pair changes nothing."""
        if self.spec.source is None:
            raise InputError(
                "nothing is drafted without a head: start again with --head or --drafter"
            )
        self.spec = self.spec.configured(tree, verifier, self.config.allow_lossy)
        self.config = replace(self.config, tree=tree, verifier=verifier)
        return self.drafting()

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

    def introduction(self, mark: str) -> list[str]:
        """The first screen. mark: the style of drafted tokens."""
        target = self.spec.target
        devices = ", ".join(sorted({str(p.device) for p in target.model.parameters()}))
        precision = str(target.dtype).removeprefix("torch.")
        lines = [f"target    {self.config.target}, {precision} on {devices}"]
        if self.spec.source is None:
            lines.append(f"drafts    {self.drafting()}")
        else:
            drafter = self.config.drafter or f"head {self.config.head}"
            marked = {
                "green": "; accepted ones are green",
                "underline": "; accepted ones are underlined",
            }
            lines.append(f"drafts    {drafter}{marked.get(mark, '')}")
            lines.append(self.drafting().replace("verifier ", "verifier  ", 1))
        return [*lines, HINTS]

    def _before(self, again: bool) -> list[Message]:
        """The messages before the one to answer."""
        return self.messages[:-2] if again and self.unanswered is None else self.messages


def opening(system: str | None) -> list[Message]:
    return [Message(role="system", content=system)] if system else []


def plain(messages: list[Message]) -> list[dict[str, str]]:
    """The messages as a chat template takes them."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]
