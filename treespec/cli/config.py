"""The options of chat, generate and trace: what decodes, and how it answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespec.api.options import DemoOptions, ModelOptions
from treespec.cli.terminal import end_notice
from treespec.options import SEEDS, chosen, option, shared
from treespec.requests.options import RequestOptions

if TYPE_CHECKING:
    from treespec.api.spec import Spec


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(DemoOptions, RequestOptions):
    PANEL = "Answers"

    max_new_tokens: int = shared(RequestOptions, "max_new_tokens", 512)
    seed: int | None = option(
        "the same seed and messages give the same answers; default: a new seed each time",
        None,
        least=0,
        most=SEEDS,
    )

    @property
    def requested(self) -> dict[str, Any]:
        """The keywords of `Spec.stream`."""
        return {"seed": self.seed} | chosen(self, RequestOptions)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(AnswerConfig):
    system: str | None = option("system message", None)


def load_spec(config: ModelOptions) -> "Spec":
    """Load what answers, which `early.begin_answers` has checked."""
    from treespec.api.load import load_options

    spec = load_options(config)
    end_notice()
    return spec
