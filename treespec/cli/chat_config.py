"""What `treespec chat` is told."""

from dataclasses import dataclass

from treespec.cli.config import AnswerConfig
from treespec.options import option


@dataclass(frozen=True, kw_only=True)
class ChatConfig(AnswerConfig):
    system: str | None = option("system message", None)
