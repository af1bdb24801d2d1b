"""The options of chat and generate: what decodes, and how it samples."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from treespec.api.options import LogitOptions, ModelOptions, SamplingOptions, TargetOptions
from treespec.cli import early
from treespec.cli.terminal import end_notice
from treespec.demo.known import DEMO
from treespec.errors import InputError
from treespec.options import SEEDS, option, shared

if TYPE_CHECKING:
    from treespec.api.spec import Spec
    from treespec.requests.request import Options


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(ModelOptions, SamplingOptions, LogitOptions):
    """What decodes, and how it samples."""

    PANEL = "Answers"

    target: str = shared(TargetOptions, "target", DEMO)
    temperature: float = option("sampling temperature; 0 is greedy", 0.0, least=0, most=100)
    min_p: float = option(
        "sample from tokens above this share of the likeliest one's probability; 0 is off",
        0.0,
        least=0,
        most=1,
    )
    seed: int | None = option(
        "the same seed and messages give the same answers; default: a new seed each time",
        None,
        least=0,
        most=SEEDS,
    )

    chat_template_kwargs: str | None = option(
        'variables for the chat template, as in {"enable_thinking": false}', None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # refuses what is not understood before anything is loaded

    def sampling(self) -> "Options":
        """The options of `Spec.stream`, without the seed."""
        options: Options = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
        }
        options.update(cast("Options", self.changes()))
        if self.chat_template_kwargs:
            options["chat_template_kwargs"] = variables_of(self.chat_template_kwargs)
        return options


def variables_of(text: str) -> dict[str, object]:
    """The variables that a JSON object names. Raises InputError."""
    try:
        variables = json.loads(text)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise InputError(
            f"--chat-template-kwargs {text!r:.40} is no JSON object, such as "
            '{"enable_thinking": false}'
        )
    return variables


def begin(config: ModelOptions, words: bool = True, chats: bool = True) -> None:
    """Announce the load and check what needs no weights. words, chats: as for `early.begin`.

    Raises InputError, HeadError and TreeError.
    """
    if config.head is not None and config.drafter is not None:
        raise InputError(
            f"both --head {config.head} and --drafter {config.drafter} are given: leave out one"
        )
    if config.source is None:
        refuse_unused(config)
        early.begin(config, words=words, chats=chats)
    else:
        early.begin(config, [config.source], words, chats)
        early.check_pairing(config.source, config.tree, config.verifier, config.allow_lossy)


def refuse_unused(config: ModelOptions) -> None:
    """Raises InputError for an option about drafts without a source of drafts."""
    given = [f"--tree {config.tree}"] if config.tree is not None else []
    given += [f"--verifier {config.verifier}"] if config.verifier != ModelOptions.verifier else []
    if given:
        raise InputError(f"{' and '.join(given)}: nothing drafts; give --head or --drafter too")


def load_spec(config: ModelOptions) -> "Spec":
    """Load what answers, which `begin` has checked."""
    from treespec.api.load import load_options

    spec = load_options(config)
    end_notice()
    return spec
