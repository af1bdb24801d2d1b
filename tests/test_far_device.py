"""Nothing mixes devices, and the waits of a cycle do not grow: on a device that counts them (`far/device.py`).

As a program it prints JSON.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from far.device import count_outside, install, launches, move_to_far, outside, record_as_graph, waits

BATCH = 4
TOKENS, GRAPH_TOKENS = 8, 24  # of an answer without graphs and with them
WARM = 8  # with graphs, cycles are counted from that one on
GRAPHED = {("eagle", "dynamic", "topk", 0), ("eagle", "dynamic", "gumbel", 1)}  # counted with graphs too
# Waits a cycle at most, of one sequence and of a batch, by drafter, tree, verifier and temperature.
SETUPS = {
    ("none", None, "topk", 0): 1,
    ("eagle", "dynamic", "topk", 0): 1,
    ("eagle3", "dynamic", "auto", 0): 1,
    ("medusa", "medusa", "auto", 1): 2,
    ("hydra", "2x3", "greedy", 1): 1,
    ("suffix", None, "topk", 1): 1,
    ("suffix", None, "auto", 0): 1,
    ("lookahead:window=3,ngram=3", None, "topk", 1): 2,
    ("eagle", "chain:3", "single", 1): 1,
    ("eagle", "chain:3", "block", 1): 2,
    ("eagle", "eagle", "rrs", 1): 1,
    ("eagle", "eagle", "rrs-wo", 1): 1,
    ("eagle", "eagle", "kseq", 1): 1,
    ("eagle", "2x3", "spechub", 1): 1,
    ("eagle", "2x3", "is-lp", 1): 1,
    ("eagle", "eagle", "optimal", 1): 1,
    ("eagle", "eagle", "traversal", 1): 2,
    ("eagle", "2x3", "block-optimal", 1): 2,
    ("eagle", "auto", "auto", 1): 2,
    ("eagle", "auto", "auto", 0): 1,
    ("dflash", "ddtree:nodes=9", "traversal", 1): 3,
    ("none", None, "auto", 1): 1,
    ("eagle", "dynamic", "gumbel", 1): 2,
}


def measure():
    """{set-up: for each batch [waits and launches a cycle, lines that wait, launches outside a head's steps], error}"""
    from models import random_model, small

    from treespec.api.spec import Spec
    from treespec.draft.auto.cost import CycleCost
    from treespec.draft.heads.eagle import EagleProposer
    from treespec.draft.heads.loading import build_new_head
    from treespec.draft.source import load_source
    from treespec.draft.spec import DrafterSpec
    from treespec.draft.tree_drafter import TreeDrafter
    from treespec.heads.registry import HEAD_KINDS
    from treespec.model import cuda_graphs as graphs
    from treespec.model.target import Target
    from treespec.model.tree_check import has_equal_bits

    # 1. A target on the device, and what drafts for it.
    torch.set_num_threads(1)  # the tensors are small
    config = small().model.config
    plain_model = Target(random_model(config, spread=0))  # a moved weight is no plain matrix
    plain_model.eos = frozenset()
    prompts = [[(7 * row + i) % 60 + 3 for i in range(20)] for row in range(BATCH)]
    how = {"max_new_tokens": GRAPH_TOKENS, "seed": [1] * BATCH}
    plain = Spec(plain_model, None, verifier="auto")
    texts = [[out.token_ids for out in plain.generate(prompts, temperature=t, **how)] for t in (0, 1)]
    heads = {}
    for name in {setup[0] for setup in SETUPS} & {*HEAD_KINDS}:
        torch.manual_seed(0)
        heads[name] = build_new_head(name, plain_model).eval()
    _library = install()
    graphs.Recorder = lambda: record_as_graph
    graphs.RECORD_AFTER_CALLS = 2
    count_outside(TreeDrafter, "draft_trees", 1)
    count_outside(EagleProposer, "extend", -1)
    count_outside(EagleProposer, "run_layers", -1)
    target = Target(move_to_far(random_model(config, spread=0)))
    target.eos = frozenset()
    assert not has_equal_bits(target)

    def source(name):
        if name in HEAD_KINDS:
            return move_to_far(heads[name])
        return None if name == "none" else load_source(DrafterSpec.parse(name), target)

    # 2. All their cycles but the first.
    found = {}
    for setup in SETUPS:
        drafter, tree, verifier, temperature = setup
        for batch, first in ((1, 2), (BATCH, 2), (1, WARM), (BATCH, WARM))[: 4 if setup in GRAPHED else 2]:
            target.tree_decoder.graphs = graphs.Graphs("Llama") if first == WARM else None
            spec = Spec(target, source(drafter), tree, verifier, times=CycleCost((1, 8), (1.0, 1.1)))
            cycles = 0
            plain = spec.decoder._run_cycle

            def run_cycle(plain=plain, first=first):
                nonlocal cycles
                cycles += 1
                if cycles == first:
                    for counts in (waits, launches, outside):
                        counts.clear()
                return plain()

            spec.decoder._run_cycle = run_cycle
            try:
                tokens = TOKENS if first == 2 else GRAPH_TOKENS
                how = {"temperature": temperature, "max_new_tokens": tokens, "batch": batch}
                outs = spec.generate(prompts[:batch], seed=[1] * batch, **how)
                has_one_text = temperature == 0 or verifier in ("auto", "gumbel")  # whatever is drafted
                wanted = [ids[: how["max_new_tokens"]] for ids in texts[temperature][:batch]]
                if has_one_text and [out.token_ids for out in outs] != wanted:
                    raise RuntimeError(f"{setup}: the texts are not the CPU's")
            except RuntimeError as error:
                found.setdefault(str(setup), []).append(str(error))
                continue
            since = cycles - first + 1
            counts = [round(count.total() / since, 1) for count in (waits, launches)]
            told = [*counts, {line: round(n / since, 2) for line, n in waits.most_common()}, outside.total() // since]
            if (batch, first) == (BATCH, WARM):  # their texts may grow as one
                how |= {"seed": 1, "batch": 1}
                alone = [spec.generate(prompt, **how).stats.accepted for prompt in prompts[:2]]
                if [out.stats.accepted for out in outs[:2]] != alone:
                    told = f"{setup}: {batch} texts are drafted for otherwise than each alone"
            found.setdefault(str(setup), []).append(told)
    return found


@pytest.fixture(scope="module")
def found():
    """In a process of its own: the device stays for good."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_nothing_mixes_devices_and_waits_do_not_grow(found, setup):
    """Nor is a batch drafted for otherwise than its texts alone."""
    assert not (faults := [counted for counted in found[str(setup)] if isinstance(counted, str)]), faults
    for counted in found[str(setup)][:2]:
        assert counted[0] <= SETUPS[setup], counted[2]


def test_a_cycle_launches_little_beside_its_forwards(found):
    most = {"topk": (40, 48, 51, 98), "gumbel": (59, 89, 100, 201)}
    for setup in GRAPHED:
        alone, batch, graphed, graphed_batch = found[str(setup)]
        counts = alone[3], batch[3], graphed[1], graphed_batch[1]
        assert all(count <= bound for count, bound in zip(counts, most[setup[2]], strict=True)), counts


if __name__ == "__main__":
    sys.modules["torchao"] = None  # transformers would import it, for seconds
    print(json.dumps(measure(), indent=1), flush=True)
    os._exit(0)  # the end of a process would look for garbage among all that was imported
