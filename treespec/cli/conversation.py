"""A conversation with a target: what was said, what answers it, and what it cost."""

from dataclasses import dataclass, field, replace
from typing import Any, final

from treespec.cli.chat_config import ChatConfig
from treespec.errors import InputError
from treespec.names import tree_name
from treespec.sampling import SamplingParams
from treespec.spec import Spec
from treespec.stats import Stats
from treespec.stream import Output, Stream

HINTS = "/help: commands · Alt-Enter: new line · Ctrl-C: stop an answer · Ctrl-D: quit"


@final
@dataclass
class Conversation:
    """messages: turns that were answered; an answer that was cut short says `interrupted`.

    unanswered: the last message, if nothing was said to it. answers, total: of all that was generated, also what a
    retry replaced.
    """

    spec: Spec
    config: ChatConfig
    colour: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)
    unanswered: str | None = None
    answers: int = 0
    total: Stats = field(default_factory=Stats)

    @property
    def opening(self) -> list[dict[str, Any]]:
        return opening(self.config.system)

    @property
    def last_message(self) -> str:
        """What a retry answers. Raises InputError where nothing was asked."""
        if self.unanswered is None and not self.messages:
            raise InputError("nothing has been asked yet")
        return self.messages[-2]["content"] if self.unanswered is None else self.unanswered

    @property
    def last_answer(self) -> str | None:
        return self.messages[-1]["content"] if self.messages and self.unanswered is None else None

    def ask(self, text: str, again: bool = False) -> Stream:
        """The answer to come; nothing is remembered before `keep`. Raises InputError as `Spec.stream` does.

        again: in place of the last answer, with the seed of its turn.
        """
        before = self._before(again)
        prompt = [*self.opening, *before, {"role": "user", "content": text}]
        return self.spec.stream(prompt, seed=self.config.seed_of(len(before)), **self.config.sampling())

    def keep(self, text: str, output: Output, interrupted: bool, again: bool = False) -> bool:
        """Remember a turn, unless nothing was answered: templates have no place for an empty answer."""
        self.total.add(output.stats)
        said = output.text.strip()
        if said:
            reply: dict[str, Any] = {"role": "assistant", "content": said}
            reply |= {"interrupted": True} if interrupted else {}
            self.messages = [*self._before(again), {"role": "user", "content": text}, reply]
            self.unanswered = None
            self.answers += 1
        elif not again:
            self.unanswered = text
        return bool(said)

    def reset(self) -> None:
        self.messages, self.unanswered, self.answers, self.total = [], None, 0, Stats()

    def change(self, **changes: Any) -> None:
        """Other sampling or another system message from the next answer on. What is refused changes nothing."""
        config = replace(self.config, **changes)
        SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)
        if config.system != self.config.system:
            self.spec.encode([*opening(config.system), {"role": "user", "content": "Hello"}])
        self.config = config

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
        verifier = self.config.verifier
        if verifier == "auto":
            verifier = self.spec.verifier.name  # of a tree that it does not go with: another
        if self.spec.policy is None:
            return f"verifier {verifier}, drafts by {self.config.drafter}"
        named, own = self.config.tree, f"{tree_name(self.spec.policy)} by default"
        return f"verifier {verifier}, {f'tree {named}' if named else own}"

    def introduction(self) -> list[str]:
        """The first screen."""
        target = self.spec.target
        devices = ", ".join(sorted({str(p.device) for p in target.model.parameters()}))
        precision = str(target.dtype).removeprefix("torch.")
        lines = [f"target    {self.config.target}, {precision} on {devices}"]
        if self.spec.source is None:
            lines.append(f"drafts    {self.drafting()}")
        else:
            drafter = self.config.drafter or f"head {self.config.head}"
            lines.append(f"drafts    {drafter}; accepted ones are green")
            lines.append(self.drafting().replace("verifier ", "verifier  ", 1))
        return [*lines, HINTS]

    def _before(self, again: bool) -> list[dict[str, Any]]:
        """What was said before the message that is to be answered."""
        return self.messages[:-2] if again and self.unanswered is None else self.messages


def opening(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []
