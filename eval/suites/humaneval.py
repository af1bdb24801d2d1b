"""HumanEval: 164 Python functions to write, with unit tests (Chen et al. 2021, 2107.03374).

The prompt is that of OpenAI's simple-evals for chat models: an instruction, then signature and
docstring. The answer counts (pass@1 with one sample) if its code passes the published tests.
"""

import gzip

from treespec.eval.suites.lines import objects, written

PROMPT = (
    "Read the following function signature and docstring, and fully implement the function "
    "described. Your response should only contain the code for this function.\n"
)


def jsonl(content: bytes) -> bytes:
    """The problems in FastChat's format, each with a check that runs its tests."""
    return written(
        {
            "question_id": problem["task_id"],
            "category": "humaneval",
            "turns": [PROMPT + problem["prompt"]],
            "reference": [problem["canonical_solution"]],
            "check": {
                "kind": "python",
                "prompt": problem["prompt"],
                "test": problem["test"],
                "entry_point": problem["entry_point"],
            },
        }
        for problem in objects(gzip.decompress(content))
    )
