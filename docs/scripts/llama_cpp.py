"""A head in llama.cpp beside the same head in treespec: greedy texts, and their cycles.

    treespec export --target demo --head HEAD --to gguf --out exported
    llama-server --model TARGET.gguf --model-draft exported/model.gguf --spec-type draft-eagle3 --spec-draft-n-max 3 \
        --cache-type-k f32 --cache-type-v f32 --flash-attn off
    python docs/scripts/llama_cpp.py http://localhost:8080 --target demo --head HEAD --questions QUESTIONS

A DFlash head takes draft-dflash, and its number of levels for --spec-draft-n-max.
TARGET.gguf: the target by llama.cpp's convert_hf_to_gguf.py, in float32. A cycle gives its accepted drafts and
one token more; there the first token of an answer comes from the prompt, without a cycle.
"""

import json
from typing import Annotated

import typer

from treespec.api.load import load
from treespec.demo.known import head_of
from treespec.eval.questions import load_questions
from treespec.heads.checkpoint import load_head
from treespec.requests.endpoint import opened


def main(
    server: Annotated[str, typer.Argument(help="its URL")],
    target: str = "demo",
    head: Annotated[str, typer.Option(help="the head before its export")] = "demo",
    questions: Annotated[str, typer.Option(help="as of treespec eval")] = "builtin",
    limit: int = 8,
    max_new_tokens: int = 64,
) -> None:  # fmt: skip
    levels = load_head(head_of(head) or head).max_depth or 3
    spec = load(target, head=head, tree=f"chain:{levels}", verifier="topk", dtype="float32")
    same, tokens, cycles, asked, accepted = 0, 0, [0, 0], 0, 0
    for question in load_questions(questions)[0][:limit]:
        prompt = spec.encode([{"role": "user", "content": question.turns[0]}])
        body = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "return_tokens": True,
        }
        with opened(f"{server}/completion", body | {"cache_prompt": False}) as reply:
            theirs = json.load(reply)
        ours = spec.generate(prompt, max_new_tokens=max_new_tokens)
        given = [token for token in ours.token_ids if token not in spec.target.eos]
        told = [token for token in theirs["tokens"] if token not in spec.target.eos]
        same += given == told
        tokens += len(theirs["tokens"])
        asked += theirs["timings"].get("draft_n", 0)
        accepted += (own := theirs["timings"].get("draft_n_accepted", 0))
        cycles[0] += len(theirs["tokens"]) - 1 - own
        cycles[1] += ours.stats.cycles
    print(
        f"{same} of {limit} texts the same; {tokens} tokens; cycles: {cycles[0]} there, {cycles[1]} here"
    )
    print(f"there {accepted} of {asked} drafts accepted")


if __name__ == "__main__":
    typer.run(main)
