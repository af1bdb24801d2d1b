"""The commands that answer: generate, trace, serve, quickstart. Figures go to standard error."""

import json
import shlex
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespec.api.options import DemoOptions, ModelOptions, TargetOptions
from treespec.cli.early import begin_answers, check_inputs_early
from treespec.cli.early_requests import check_request
from treespec.cli.endings import ClosingLines, end_answers, judge, print_ending
from treespec.cli.libraries import import_libraries
from treespec.cli.options import build_command
from treespec.cli.terminal import end_notice, read_standard_input, show_notice
from treespec.cli.wrapping import WordWrapper, find_terminal_width
from treespec.demo.known import DEMO_NAME, choose_default_drafter
from treespec.engine.options import RequestOptions
from treespec.errors import InputError, describe_os_error
from treespec.files.atomic import check_folder
from treespec.files.distribution import check_extra
from treespec.files.printable import to_printable
from treespec.options import (
    MAX_SEED,
    MAX_TEXT_TOKENS,
    CommandOptions,
    list_changed_options,
    option,
    reuse_option,
)
from treespec.serve.options import ServeConfig
from treespec.text.strings import decode_command_line

if TYPE_CHECKING:
    from treespec.api.spec import Spec
    from treespec.engine.stats import Stats
    from treespec.text.prompts import Single


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(DemoOptions, RequestOptions):
    """The options of target, drafter and request."""

    PANEL = "Answers"

    max_new_tokens: int = reuse_option(RequestOptions, "max_new_tokens", 512)
    seed: int | None = option(
        "the same seed and messages give the same answers; default: a new seed each time",
        None,
        least=0,
        most=MAX_SEED,
    )

    @property
    def requested(self) -> dict[str, Any]:
        """The keywords of `Spec.stream`."""
        return {"seed": self.seed} | list_changed_options(self, RequestOptions)


def load_spec(config: ModelOptions) -> "Spec":
    """Load target and drafter, after `begin_answers` has checked the options."""
    import_libraries(config.target)
    from treespec.api.load import load_options

    spec = load_options(config)
    show_notice("measuring what drafts cost here, once for each model and machine …")
    spec.measure()
    end_notice()
    return spec


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AnswerConfig):
    prompt: list[str] | None = option(
        "message to answer; - or no --prompt reads standard input; repeat the option for several "
        "messages, which are answered together",
        None,
    )
    n: int = option("give this number of answers to each message", 1, least=1, most=4096)
    batch: int | None = option("answers decoded at a time; default: all", None, least=1, most=4096)
    raw: bool = option("continue the prompt as plain text, without the chat template", False)
    json: bool = option(
        "print each answer as a line of JSON: text, token ids, why it ended, figures", False
    )


@build_command(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Answer a prompt and print it as it comes, or several prompts, separated by empty lines.

    A terminal shows control characters in an answer as symbols. A pipe gets them unchanged.
    """
    # 1. Read the prompts before anything is loaded.
    texts = config.prompt
    if not texts:
        texts = ["-"]
    prompts = [read_prompt(text, config.raw) for text in texts]
    begin_answers(config, chats=not config.raw)
    check_request(config, list_prompt_texts(prompts))

    # 2. Print one answer as it arrives, or several once all have ended; then the figures.
    spec = load_spec(config)
    from treespec.engine.stats import format_stats

    if len(prompts) == 1 and config.n == 1 and not config.json:
        stats = print_stream(spec, prompts[0], config)
    else:
        stats = print_answers(spec, prompts, config)
    figures = format_stats(stats, explain=True)
    print_ending(end_answers(config, figures, stats.new_tokens, stats.cycles))


def print_stream(spec: "Spec", prompt: "Single", config: GenerateConfig) -> "Stats":
    """Print an answer as it arrives, and return its figures."""
    stream = spec.stream(prompt, **config.requested)
    wrapper = WordWrapper(find_terminal_width())
    try:
        for piece in stream:
            wrapper.add(show_text(piece.text), {})
    finally:
        wrapper.finish()
    print()
    return stream.stats


def print_answers(spec: "Spec", prompts: "list[Single]", config: GenerateConfig) -> "Stats":
    """Print the answers to prompts once all have ended, as text or JSON, and return their summed figures."""
    from treespec.engine.stats import Stats

    total = Stats()
    texts = []
    lines = []
    several: Any = prompts
    for outputs in spec.generate(several, n=config.n, batch=config.batch, **config.requested):
        for output in outputs:
            texts.append(show_text(output.text))
            lines.append(json.dumps(output.to_json(), ensure_ascii=False))
            total.add(output.stats)
    if config.json:
        print("\n".join(lines))
    else:
        print("\n\n".join(texts))
    return total


def show_text(text: str) -> str:
    """An answer's text as it is printed: with symbols for control characters on a terminal, unchanged in a pipe."""
    if sys.stdout.isatty():
        return to_printable(text)
    return text


def read_prompt(text: str, raw: bool) -> "Single":
    """Read a prompt from an argument, or from standard input for `-`. Raises InputError if it is empty."""
    if text == "-":
        text = read_standard_input().strip()
    else:
        text = decode_command_line(text, "--prompt")
    if not text:
        raise InputError("the prompt is empty: give one by --prompt or on standard input")
    if raw:
        return text
    return [{"role": "user", "content": text}]


def list_prompt_texts(prompts: "list[Single]") -> list[str]:
    """The text of each prompt: of plain text, or of the message that `read_prompt` makes."""
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            message: Any = prompt[0]
            prompt = message["content"]
        texts.append(prompt)
    return texts


@dataclass(frozen=True, kw_only=True)
class TraceConfig(AnswerConfig):
    prompt: str = option("message to answer; - reads standard input", "-")
    json: bool = option("print a JSON object per cycle, for tools", False)
    raw: bool = reuse_option(GenerateConfig, "raw")
    max_new_tokens: int = reuse_option(AnswerConfig, "max_new_tokens", 64)


@build_command(TraceConfig)
def trace(config: TraceConfig) -> None:
    """Answer a prompt and show every cycle: the drafted tree, what was accepted, and why no more.

    q: the draft model's probability of a token, p: the target's; at temperature 0, theirs at 1.
    """
    # 1. Refuse bad input before anything is loaded.
    prompt = read_prompt(config.prompt, config.raw)
    config.check_one_source()
    begin_answers(config, chats=not config.raw)
    check_request(config, list_prompt_texts([prompt]))

    # 2. Answer, and show each cycle as it arrives.
    spec = load_spec(config)
    from treespec.api.trace import trace as cycles_of
    from treespec.cli.trace import show
    from treespec.engine.stats import format_tau

    tokens = 0
    count = 0
    for count, cycle in enumerate(cycles_of(spec, prompt, **config.requested), 1):
        tokens += cycle.new_tokens
        if config.json:
            print(json.dumps(cycle.to_json() | {"text": cycle.text}), flush=True)
        else:
            show(cycle, tokens / count)
    figures = format_tau(tokens, count)
    print_ending(end_answers(config, figures, tokens, count))


@build_command(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Answer OpenAI's HTTP API, and show a page to chat on.

    Ctrl-C or SIGTERM ends the server once running answers have finished.
    """
    check_extra("serve", "the server")
    if config.log_completions:
        check_folder(Path(config.log_completions).expanduser(), "--log-completions")
    begin_answers(config, words=False, chats=False)
    listening = bind_socket(config.host, config.port)
    from treespec.serve.loading import answering_while_loading

    with answering_while_loading(listening):
        spec = load_spec(config)
        spec.warm_up()
        from treespec.engine.stats import format_tau
        from treespec.serve import run

    if config.target == DEMO_NAME and not config.name:
        config = replace(config, name=DEMO_NAME)
    served = run.serve(spec, config, listening)
    if served.tokens:
        figures = format_tau(served.tokens, served.cycles)
        print_ending(end_answers(config, figures, served.tokens, served.cycles))


def bind_socket(host: str, port: int) -> socket.socket:
    """Open a socket that listens at an address. port: 0 takes a free port.

    Raises: InputError if the address is in use, or is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        reason = describe_os_error(error)
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}; name others by --host and --port"
        ) from error


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(CommandOptions):
    target: str = reuse_option(TargetOptions, "target", DEMO_NAME)
    max_new_tokens: int = option(
        "end a completion after this number of tokens", 48, least=1, most=MAX_TEXT_TOKENS
    )


@build_command(QuickstartConfig)
def quickstart(config: QuickstartConfig) -> None:
    """See a chat model answer faster, side by side, and verifiers measured, in about a minute."""
    # 1. Load the target. Without a head, drafts are looked up in the text itself.
    drafter = choose_default_drafter(config.target)
    check_inputs_early(TargetOptions(target=config.target), [drafter], chats=True)
    import_libraries(config.target)
    from rich.console import Console

    from treespec.api.load import load
    from treespec.cli.side_by_side import (
        build_verifier_table,
        explain_wide_trees,
        measure_verifiers,
        show_side_by_side,
    )

    spec = load(config.target, drafter=drafter)
    end_notice()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"1/3  {spec}")

    # 2. Compare one token at a time with treespec.
    console.print("2/3  Three questions at temperature 0, one token at a time and with treespec")
    comparison = show_side_by_side(spec, config.max_new_tokens, console)
    console.print(str(comparison))

    # 3. Compare verifiers. Look-up drafters have no draft distribution, so few verifiers apply.
    console.print("\n3/3  Verifiers on the same questions at temperature 1")
    verifiers = ["auto", "topk"]
    if spec.head:
        verifiers = ["auto", "single", "rrs-wo", "traversal", "block-optimal"]
    totals = measure_verifiers(spec, verifiers, config.max_new_tokens)
    console.print(build_verifier_table(totals))
    explanation = explain_wide_trees(totals)
    if explanation:
        console.print(explanation)

    # 4. Nothing is written, so the figures stand for it in the ending.
    words = [str(Path(sys.executable).parent / "treespec"), "chat"]
    if config.target != DEMO_NAME:
        words += ["--target", config.target, "--drafter", drafter]
    finding = f"treespec is {comparison.speedup:.2f} times as fast as one token at a time"
    verdict = judge(comparison.speedup > 1, finding)
    print_ending(
        ClosingLines("Nothing was written: the figures are above", verdict, shlex.join(words))
    )
