"""Train a small draft model on conversations that its target wrote: `python docs/scripts/draft_model.py --help`.

A Llama with the target's tokenizer, for `--drafter model:OUT`. Its embeddings begin as the best approximation of the
target's of that width. The loss is the cross-entropy of the answers' tokens. Of the tokens that no answer of a step
has, a sample stands for all, since on a CPU the whole vocabulary would take nearly all of the time.
"""

import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from treespec.demo.fetch import find_model_path
from treespec.text.conversations import read_conversations
from treespec.text.encoding import Example, encode_conversations

SAMPLE = 4096  # tokens of the vocabulary in a step's loss, besides those of the answers
# Standard deviation of the embeddings, so that all tokens are about as likely at first.
START_SCALE = 0.05
WARM_UP = 0.05  # share of the time in which the learning rate rises; then it falls to 0


def build_model(folder: str, layers: int, width: int) -> LlamaForCausalLM:
    """Build a Llama of heads of 64, whose embeddings are the target's, projected to `width` dimensions."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embeddings = target.get_input_embeddings().weight.detach()
    config = LlamaConfig(
        vocab_size=len(embeddings),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    left, scales, _ = torch.svd_lowrank(embeddings, q=width, niter=4)
    with torch.no_grad():
        projected = left * scales
        model.get_input_embeddings().weight.copy_(projected * (START_SCALE / projected.std()))
    return model


def compute_loss(model: LlamaForCausalLM, examples: list[Example]) -> Tensor:
    """Compute the cross-entropy of the answers' tokens of some examples."""
    ids = pad_sequence([example.input_ids for example in examples], batch_first=True)
    counts = pad_sequence([example.loss_mask for example in examples], batch_first=True)[:, 1:]
    states = model.model(ids[:, :-1]).last_hidden_state[counts]  # rows are padded on the right
    embeddings = model.lm_head.weight
    tokens, answers = ids[:, 1:][counts].unique(return_inverse=True)
    others = torch.randint(len(embeddings), (SAMPLE,))
    others = others[~torch.isin(others, tokens)]
    weight = (len(embeddings) - len(tokens)) / len(
        others
    )  # tokens that each of the others stands for
    other_logits = states @ embeddings[others].T + math.log(weight)
    return cross_entropy(torch.cat([states @ embeddings[tokens].T, other_logits], 1), answers)


def main(
    target: str, data: str, out: Path, layers: int = 2, width: int = 192, minutes: float = 12.0,
    learning_rate: float = 2e-3, batch: int = 2, length: int = 512, seed: int = 0,
) -> None:  # fmt: skip
    """Train on batches of conversations, cut to `length` tokens, and write the model to OUT.

    minutes: of processor time, all cores together.
    """
    # 1. The model and the conversations.
    torch.manual_seed(seed)
    folder = find_model_path(target)  # that of `demo`; other names as they are
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build_model(folder, layers, width)
    examples, report = encode_conversations(tokenizer, read_conversations(data)[0], None, length)
    print(f"{report}; {model.num_parameters() / 1e6:.1f} M parameters")

    # 2. Steps, until the time is up.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    order = shuffle_forever(examples, seed)
    started = time.process_time()
    losses: list[float] = []
    while (share := (time.process_time() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(share / WARM_UP, (1 - share) / (1 - WARM_UP))
        loss = compute_loss(model, list(itertools.islice(order, batch)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 25 == 0:
            print(f"step {len(losses)}, {share:.0%}: loss {sum(losses[-25:]) / 25:.3f}", flush=True)

    # 3. The folder.
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{len(losses)} steps, saved in {out}")


def shuffle_forever(examples: list[Example], seed: int) -> Iterator[Example]:
    """Yield all examples in random order, then all again in another one, without end."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(examples, len(examples))


if __name__ == "__main__":
    typer.run(main)
