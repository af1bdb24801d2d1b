"""GSM8K: 1,319 word problems with a number as the answer (Cobbe et al. 2021, 2110.14168).

The prompt is that of Meta's evaluation of Llama 3, which lm-evaluation-harness has as
`gsm8k_cot_llama`, asked without examples: a chat model reasons of its own accord. The published
answer ends with the number, after four hash signs.
"""

from treespec.eval.suites.lines import objects, written

MARK = "####"  # before the number that a published answer ends with
PROMPT = (
    "Given the following problem, reason and give a final answer to the problem.\n"
    "Problem: {question}\n"
    'Your response should end with "The final answer is [answer]" where [answer] is the response '
    "to the problem."
)


def jsonl(content: bytes) -> bytes:
    """The problems in FastChat's format, each with a check on its number."""
    return written(
        {
            "question_id": f"gsm8k/{number}",
            "category": "gsm8k",
            "turns": [PROMPT.format(question=problem["question"])],
            "reference": [problem["answer"]],
            "check": check(problem["answer"]),
        }
        for number, problem in enumerate(objects(content))
    )


def check(answer: str) -> dict[str, str]:
    """The check that belongs to a published answer."""
    return {"kind": "number", "answer": answer.rpartition(MARK)[2].strip()}
