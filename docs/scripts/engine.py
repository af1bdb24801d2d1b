"""A head in llama.cpp or vLLM beside the same head in treespec: greedy texts, their cycles and accepted drafts.

    treespec export --target demo --head HEAD --to gguf --out exported
    llama-server --model TARGET.gguf --model-draft exported/model.gguf --spec-type draft-eagle3 --spec-draft-n-max 3 \
        --cache-type-k f32 --cache-type-v f32 --flash-attn off
    python docs/scripts/engine.py llama.cpp http://localhost:8080 --target demo --head HEAD --questions QUESTIONS

    treespec export --target demo --head HEAD --to vllm --out exported
    vllm serve MODEL --dtype float32 --enforce-eager --max-model-len 1024 \
        --speculative-config '{"method": "eagle3", "model": "exported", "num_speculative_tokens": 3}'
    python docs/scripts/engine.py vllm http://localhost:8000 --target demo --head HEAD --questions QUESTIONS

In llama.cpp a DFlash head takes draft-dflash, and its number of levels for --spec-draft-n-max. In vLLM the method is
eagle, eagle3, medusa or, with --to speculators, dflash. TARGET.gguf: the target by llama.cpp's convert_hf_to_gguf.py,
in float32. A cycle gives its accepted drafts and one token more; in both the first token of an answer comes from the
prompt, without a cycle.
"""

import json
import re
from typing import Annotated, Any, Literal

import typer

from treespec.api.load import load
from treespec.demo.known import find_head_for
from treespec.eval.questions import load_questions
from treespec.files.openai_client import open_request
from treespec.heads.checkpoint import load_head

ASK = {
    "llama.cpp": ("completion", {"return_tokens": True, "cache_prompt": False}, "n_predict"),
    "vllm": ("v1/completions", {"return_token_ids": True}, "max_tokens"),
}
TOKENS = 64  # of an answer
COUNTS = r"^vllm:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\{.*\} (\S+)$"


def answer(engine: str, server: str, prompt: list[int]) -> Any:
    path, options, most = ASK[engine]
    with open_request(
        f"{server}/{path}", options | {"prompt": prompt, "temperature": 0, most: TOKENS}
    ) as reply:
        return json.load(reply)


def counted(server: str) -> list[int]:
    """vLLM's cycles with drafts so far, and its accepted drafts at depth 1, 2, …"""
    with open_request(f"{server}/metrics") as reply:
        found = re.findall(COUNTS, reply.read().decode(), re.MULTILINE)
    return [int(float(count)) for count in found]


def main(
    engine: Annotated[Literal["llama.cpp", "vllm"], typer.Argument()],
    server: Annotated[str, typer.Argument(help="its URL")],
    target: str = "demo",
    head: Annotated[str, typer.Option(help="the head before its export")] = "demo",
    questions: Annotated[str, typer.Option(help="as of treespec eval")] = "builtin",
    limit: int = 8,
) -> None:  # fmt: skip
    levels = load_head(find_head_for(head) or head).max_depth or 3
    spec = load(target, head=head, tree=f"chain:{levels}", verifier="topk", dtype="float32")
    before = counted(server) if engine == "vllm" else []
    same, tokens, cycles, accepted, ours_accepted = 0, 0, 0, 0, list[int]()
    for question in load_questions(questions)[0][:limit]:
        prompt = spec.encode([{"role": "user", "content": question.turns[0]}])
        theirs = answer(engine, server, prompt)
        told = theirs["tokens"] if engine == "llama.cpp" else theirs["choices"][0]["token_ids"]
        ours = spec.generate(prompt, max_new_tokens=TOKENS)
        given = [token for token in ours.token_ids if token not in spec.target.eos]
        same += given == [token for token in told if token not in spec.target.eos]
        tokens += len(told)
        ours_accepted += ours.stats.accepted
        if engine == "llama.cpp":
            accepted += (own := theirs["timings"].get("draft_n_accepted", 0))
            cycles += len(told) - 1 - own
    by_depth = [accepted]
    if engine == "vllm":
        now = counted(server)
        cycles, *by_depth = (b - a for a, b in zip(before or [0] * len(now), now, strict=True))
    here = [sum(length >= depth for length in ours_accepted) for depth in range(1, levels + 1)]
    print(
        f"{same} of {limit} texts the same; {tokens} tokens; cycles: {cycles} there, {len(ours_accepted)} here"
    )
    print(f"accepted there {sum(by_depth)}, at depth 1, 2, …: {by_depth}; here {sum(here)}: {here}")


if __name__ == "__main__":
    typer.run(main)
