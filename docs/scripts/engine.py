"""Compare a head in llama.cpp or vLLM with the same head in treespec: greedy texts, cycles and accepted drafts.

    treespec export --target demo --head HEAD --to gguf --out exported
    llama-server --model TARGET.gguf --model-draft exported/model.gguf --spec-type draft-eagle3 --spec-draft-n-max 3 \
        --cache-type-k f32 --cache-type-v f32 --flash-attn off
    python docs/scripts/engine.py llama.cpp http://localhost:8080 --target demo --head HEAD --questions QUESTIONS

    treespec export --target demo --head HEAD --to vllm --out exported
    vllm serve MODEL --dtype float32 --enforce-eager --max-model-len 1024 \
        --speculative-config '{"method": "eagle3", "model": "exported", "num_speculative_tokens": 3}'
    python docs/scripts/engine.py vllm http://localhost:8000 --target demo --head HEAD --questions QUESTIONS

In llama.cpp a DFlash head needs --spec-type draft-dflash, and its number of levels as --spec-draft-n-max. In vLLM the
method is eagle, eagle3, medusa or, with --to speculators, dflash. TARGET.gguf is the target in float32, converted by
llama.cpp's convert_hf_to_gguf.py. A cycle emits its accepted drafts and one more token. In both engines the prefill
emits the first token of an answer, without a cycle.
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
TOKENS = 64  # length of an answer
COUNTS = r"^vllm:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\{.*\} (\S+)$"


def answer(engine: str, server: str, prompt: list[int]) -> Any:
    path, options, length_field = ASK[engine]
    with open_request(
        f"{server}/{path}", options | {"prompt": prompt, "temperature": 0, length_field: TOKENS}
    ) as reply:
        return json.load(reply)


def counted(server: str) -> list[int]:
    """Read from vLLM's metrics the number of cycles with drafts so far, then the accepted drafts at depth 1, 2, …"""
    with open_request(f"{server}/metrics") as reply:
        values = re.findall(COUNTS, reply.read().decode(), re.MULTILINE)
    return [int(float(count)) for count in values]


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
    counts_before = counted(server) if engine == "vllm" else []
    same, tokens, cycles, accepted, ours_accepted = 0, 0, 0, 0, list[int]()
    for question in load_questions(questions)[0][:limit]:
        prompt = spec.encode([{"role": "user", "content": question.turns[0]}])
        reply = answer(engine, server, prompt)
        their_tokens = (
            reply["tokens"] if engine == "llama.cpp" else reply["choices"][0]["token_ids"]
        )
        output = spec.generate(prompt, max_new_tokens=TOKENS)
        our_tokens = [token for token in output.token_ids if token not in spec.target.eos]
        same += our_tokens == [token for token in their_tokens if token not in spec.target.eos]
        tokens += len(their_tokens)
        ours_accepted += output.stats.accepted
        if engine == "llama.cpp":
            accepted += (accepted_drafts := reply["timings"].get("draft_n_accepted", 0))
            cycles += len(their_tokens) - 1 - accepted_drafts
    by_depth = [accepted]
    if engine == "vllm":
        counts_now = counted(server)
        cycles, *by_depth = (
            b - a for a, b in zip(counts_before or [0] * len(counts_now), counts_now, strict=True)
        )
    accepted_here = [
        sum(length >= depth for length in ours_accepted) for depth in range(1, levels + 1)
    ]
    print(
        f"{same} of {limit} texts the same; {tokens} tokens; cycles: {cycles} there, {len(ours_accepted)} here"
    )
    print(
        f"accepted there {sum(by_depth)}, at depth 1, 2, …: {by_depth}; here {sum(accepted_here)}: {accepted_here}"
    )


if __name__ == "__main__":
    typer.run(main)
