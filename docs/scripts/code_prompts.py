"""Write questions for `treespec regenerate`, most of them about code: `python docs/scripts/code_prompts.py --help`.

One part asks for functions in the manner of MBPP ("Write a Python function that …"), put together from lists of tasks
and of forms; the others take the questions about code, and those about anything else, out of ShareGPT. HumanEval's own
functions are kept out, because `treespec eval --questions humaneval` measures on them.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from treespec.train.data.known import find_data_file
from treespec.train.regenerate.questions import matches_filter

TASKS = """
counts the {items} of a {container} that {condition}
returns the {items} of a {container} that {condition}, in their order
removes the {items} that {condition} from a {container} without changing the order of the others
splits a {container} into the {items} that {condition} and the others
finds the first of the {items} in a {container} that {condition}, and returns None if there is none
groups the {items} of a {container} by whether they {bare_condition}
returns the positions of the {items} in a {container} that {condition}
replaces the {items} of a {container} that {condition} by a given value
returns the largest of the {items} of a {container} that {condition}
checks whether all {items} of a {container} {bare_condition}
""".strip().splitlines()
ITEMS = {
    "numbers": (
        "are even|are divisible by a given number|lie between two limits|are perfect squares|have more than two digits|"
        "are larger than their left neighbour|occur more than once|are powers of two|are palindromes in base ten|"
        "have an odd sum of digits"
    ),
    "words": (
        "start with a vowel|are longer than a given length|are palindromes|contain a given letter twice|"
        "are in upper case|have no repeated letter|end with a given suffix|are anagrams of a given word|"
        "contain a digit|come before a given word in the alphabet"
    ),
    "tuples": (
        "have equal first and last elements|are sorted|contain None|have a sum above a limit|"
        "have only positive numbers|are longer than two elements"
    ),
    "dictionaries": (
        "have a given key|have more than three keys|map every key to a string|have a value above a limit|"
        "are contained in another dictionary"
    ),
    "lines": (
        "are empty|start with a comment sign|contain a date|match a regular expression|are indented by four spaces|"
        "have more than eighty characters"
    ),
}
CONTAINERS = {
    "numbers": "list|nested list|file with one number a line|generator|NumPy array",
    "words": "sentence|list of strings|text file|set|comma-separated string",
    "tuples": "list of tuples|set of tuples|matrix given as a list of rows",
    "dictionaries": "list of dictionaries|JSON file|nested dictionary",
    "lines": "text file|multi-line string|log file",
}
FORMS = (
    "Write a Python function that {task}.",
    "Write a python function `{name}` that {task}. Add a docstring and type hints.",
    'Complete this function:\n\n```python\ndef {name}({argument}):\n    """Function that {task}."""\n```',
    "Write a function in Python that {task}, and three assert statements that test it.",
    "I need a Python function that {task}. It must work on empty input too. Explain it in two sentences.",
    "Explain, with code, how to write a JavaScript function that {task}.",
)
CODE_MARKS = re.compile(
    r"```|\b(python|javascript|java|c\+\+|sql|html|css|function|code|script|regex|api|class)\b",
    re.I,
)


def list_function_prompts() -> Iterator[str]:
    """List the questions for functions: every task with every item, condition and container, each in one form."""
    forms = itertools.cycle(FORMS)
    for task, (items, conditions) in itertools.product(TASKS, ITEMS.items()):
        for condition, container in itertools.product(
            conditions.split("|"), CONTAINERS[items].split("|")
        ):
            words = task.format(
                items=items, container=container, condition=condition, bare_condition=condition
            )
            name = "_".join(re.findall("[a-z]+", words)[:4])
            argument = container.split()[0].lower()
            yield next(forms).format(task=words, name=name, argument=argument)


def list_shared_prompts(path: Path, longest: int, about_code: bool) -> Iterator[str]:
    """List the first questions of ShareGPT's conversations, in English: those about code, or the others."""
    for line in path.open(encoding="utf-8"):
        turns = json.loads(line)["conversations"]
        questions = [turn["value"] for turn in turns if turn["from"] == "human"]
        first = questions[0] if questions else ""
        has_marks = CODE_MARKS.search(first) is not None
        if len(first) <= longest and has_marks == about_code and matches_filter(first, "english"):
            yield first


def write_prompts(
    out: Path,
    functions: Annotated[int, typer.Option(help="questions for functions")] = 1400,
    shared: Annotated[int, typer.Option(help="questions of ShareGPT about code")] = 1400,
    general: Annotated[int, typer.Option(help="questions of ShareGPT about anything else")] = 1200,
    longest: Annotated[int, typer.Option(help="characters of a first question of ShareGPT")] = 1500,
    seed: int = 0,
) -> None:
    """Write the questions, shuffled, as rows of `messages`."""
    draw = random.Random(seed)
    function_prompts = list(list_function_prompts())
    sharegpt = find_data_file("sharegpt")
    rows = draw.sample(function_prompts, functions)
    for number, about_code in ((shared, True), (general, False)):
        rows += draw.sample(list(list_shared_prompts(sharegpt, longest, about_code)), number)
    draw.shuffle(rows)
    with out.open("w", encoding="utf-8") as file:
        for number, question in enumerate(rows):
            row = {"id": f"code-{number}", "messages": [{"role": "user", "content": question}]}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    typer.run(write_prompts)
