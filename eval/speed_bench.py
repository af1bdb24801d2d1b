"""SPEED-Bench of NVIDIA (2604.09557): questions for speculative decoding, in one file on the hub for each part.

The part `qualitative` has 880 questions of eleven categories. The parts `throughput_1k` to `throughput_32k` have 1,536
prompts each, of about that many tokens, by the entropy of their answers: low_entropy, mixed and high_entropy.

The hub's files hold a placeholder where a source forbids copies. NVIDIA's scripts fill it in and write a file:
prepare_data.py of Model-Optimizer a parquet file with `turns`, prepare.py of NeMo-Skills JSONL with `messages`.
"""

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

from treespec.errors import InputError, get_first_line
from treespec.files.distribution import check_extra
from treespec.files.downloads import HubFile
from treespec.text.sources import PARQUET_START

SPEED_BENCH_PARTS = {
    "speed-bench": "qualitative",
    "speed-bench-1k": "throughput_1k",
    "speed-bench-2k": "throughput_2k",
    "speed-bench-8k": "throughput_8k",
    "speed-bench-16k": "throughput_16k",
    "speed-bench-32k": "throughput_32k",
}
SPEED_BENCH_COMMIT = "487aa718444e816458d1a0a52bfce7a454285cf4"
UNPUBLISHED_TEXT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def build_hub_file(part: str) -> HubFile:
    """Build the place of a part on the hub. The commit says which file it is."""
    file = f"{part}/test-00000-of-00001.parquet"
    return HubFile("nvidia/SPEED-Bench", file, revision=SPEED_BENCH_COMMIT)


def iterate_parquet_rows(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file. Raises InputError for a damaged file, and if pyarrow is not installed."""
    check_extra("data", "a parquet file of questions", "pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        yield from ParquetFile(BytesIO(content)).read().to_pylist()
    except pyarrow.ArrowException as error:
        reason = get_first_line(error)
        raise InputError(f"the parquet file of questions is damaged: {reason}") from error


def to_jsonl(content: bytes) -> bytes:
    """Convert a file of questions to JSONL, if it is a parquet file. Raises what `iterate_parquet_rows` raises."""
    if not content.startswith(PARQUET_START):
        return content
    return "\n".join(map(json.dumps, iterate_parquet_rows(content))).encode()


def list_user_turns(messages: object) -> list[object]:
    """List the texts of messages that are all the user's. Raises ValueError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("no `turns`, a list of texts that are not empty, and no `messages`")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            raise ValueError("`messages` may only be the user's")
        turns.append(message.get("content"))
    return turns


def check_published(turns: Sequence[str]) -> None:
    """Raise ValueError if the hub's file has a placeholder instead of a text."""
    if any(turn.startswith(UNPUBLISHED_TEXT) for turn in turns):
        raise ValueError(
            "its text is not in the hub's file: fill it in by NVIDIA's prepare_data.py"
        )
