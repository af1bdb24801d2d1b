"""What every command that decodes needs to know: which target, head, tree and verifier, placed how."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespec.cli.early import check_pairing, check_sources
from treespec.cli.terminal import end_notice, notice
from treespec.errors import InputError
from treespec.options import DRAFTER, SEEDS, TOKENS, TRUST, check_ranges, option

if TYPE_CHECKING:
    from treespec.spec import Spec


@dataclass(frozen=True)
class ModelConfig:
    target: str = option("target model: a directory or a hub id")
    head: str | None = option("draft head: a directory or a hub id; none decodes one token at a time", None)
    drafter: str | None = option(DRAFTER, None)
    tree: str | None = option(
        "auto, eagle, medusa, chain:5, 2x4, dynamic:nodes=60, sampled:nodes=26, confident, or a JSON file of paths; "
        "default: the verifier's own",
        None,
    )
    verifier: str = option(
        "auto: what is fastest, chosen anew each cycle; or single, rrs, rrs-wo, kseq, spechub, greedy, is-lp, "
        "otm-lp, optimal, valued, topk, typical (lossy), block, traversal or layer:greedy",
        "auto",
    )
    allow_lossy: bool = option("let the verifier change the law of the text", False)
    template: str | None = option("name of an fschat template; default: the tokenizer's own", None)
    device_map: str = option("accelerate's placement: auto, cpu, cuda:0, balanced, …", "auto")
    dtype: str = option("auto, float32, bfloat16 or float16", "auto")
    trust_remote_code: bool = option(TRUST, False)
    compile: bool = option("compile the forwards of target and head: faster after up to a minute that it takes", False)


@dataclass(frozen=True)
class AnswerConfig(ModelConfig):
    """Raises InputError for a number out of its range."""

    temperature: float = option("0 is greedy", 0.0, least=0, most=100)
    top_k: int = option("keep the k likeliest tokens; 0 is off", 0, least=0, most=TOKENS * 10)
    top_p: float = option("keep the likeliest tokens up to this probability; 1 is off", 1.0, above=0, most=1)
    min_p: float = option(
        "keep tokens above this share of the likeliest one's probability; 0 is off", 0.0, least=0, most=1
    )
    max_new_tokens: int = option("end an answer after so many tokens", 512, least=1, most=TOKENS)
    seed: int | None = option(
        "same seed and messages, same answers; default: new ones each time", None, least=0, most=SEEDS
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def sampling(self, turn: int = 0) -> dict[str, Any]:
        """The options of `Spec.stream`. turn: answers of one conversation have seeds of their own."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
            "seed": None if self.seed is None else self.seed + turn,
        }


def begin(config: ModelConfig) -> None:
    """Say at once what is loaded, and check what needs no weights and no transformers, which takes seconds to import.

    Raises InputError and TreeError.
    """
    notice(f"loading {config.target} …")
    check_sources(config.target, config.head, () if config.drafter is None else (config.drafter,))
    check_pairing(drafter_of(config), config.tree, config.verifier, config.allow_lossy)
    if config.template is not None:
        from treespec.text.templates import check

        check(None, config.template)


def drafter_of(config: ModelConfig) -> str | None:
    """As `kind:value`. Raises InputError where both options that name one are given."""
    if config.head and config.drafter:
        raise InputError(f"both --head {config.head} and --drafter {config.drafter} are given: leave out one")
    return f"head:{config.head}" if config.head else config.drafter


def load_spec(config: ModelConfig) -> "Spec":
    """What answers."""
    begin(config)
    from treespec.spec import load

    if config.compile:
        end_notice()
        print("compiling, which may take a minute …", file=sys.stderr)
    spec = load(
        config.target,
        config.head,
        config.tree,
        config.verifier,
        drafter=config.drafter,
        allow_lossy=config.allow_lossy,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        compile=config.compile,
    )
    if config.compile:
        spec.warm_up()
    end_notice()
    return spec
