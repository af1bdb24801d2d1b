"""Nothing mixes devices, and the waits of a cycle do not grow: on a device that counts them.

As a program it prints JSON: for each set-up the waits and launches of a cycle.
"""

import json
import os
import subprocess
import sys

import pytest

BATCH = 4
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
    """{a set-up's line: [waits and launches a cycle, the places of waits, launches of drafting outside the head's
    steps, or an error], by batch, the last two with graphs}.
    """
    import far_device
    import torch
    from models import CONFIGS, random_model

    from treespec.api.spec import Spec
    from treespec.draft.auto.cost import Cost
    from treespec.draft.heads.loading import new_head
    from treespec.draft.heads.proposers import EagleProposer
    from treespec.draft.source import load_source
    from treespec.draft.spec import DrafterSpec
    from treespec.draft.tree_drafter import TreeDrafter
    from treespec.heads.registry import HEADS
    from treespec.model import cuda_graphs as graphs
    from treespec.model.target import Target
    from treespec.model.tree_check import has_equal_bits

    # 1. A target on the device, and what drafts for it.
    torch.set_num_threads(1)  # the tensors are small
    plain_model = Target(random_model(CONFIGS["llama"](), spread=0))  # a moved weight is no plain matrix
    heads = {}
    for name in {setup[0] for setup in SETUPS} & {*HEADS}:
        torch.manual_seed(0)
        heads[name] = new_head(name, plain_model).eval()
    keep = far_device.install()
    graphs.Recorder = lambda: far_device.again
    graphs.MET = 2
    for method in ((TreeDrafter, "draft_trees", 1), (EagleProposer, "extend", -1), (EagleProposer, "pairs", -1)):
        far_device.counted(*method)
    target = Target(far_device.moved(random_model(CONFIGS["llama"](), spread=0)))
    target.eos = plain_model.eos = frozenset()
    assert not has_equal_bits(target)

    def source(name):
        if name in HEADS:
            return far_device.moved(heads[name])
        return None if name == "none" else load_source(DrafterSpec.parse(name), target)

    # 2. All their cycles but the first.
    found = {}
    for setup in SETUPS:
        drafter, tree, verifier, temperature = setup
        for batch, first in ((1, 2), (BATCH, 2), (1, WARM), (BATCH, WARM)):
            if first == WARM and setup not in GRAPHED:
                continue
            target.graphs = graphs.Graphs("Llama") if first == WARM else None
            spec = Spec(target, source(drafter), tree, verifier, times=Cost((1, 8), (1.0, 1.1)))
            cycles = 0
            plain = spec.decoder._cycle

            def counted(plain=plain, first=first):
                nonlocal cycles
                cycles += 1
                if cycles == first:
                    far_device.waits.clear()
                    far_device.launches.clear()
                    far_device.outside = 0
                return plain()

            spec.decoder._cycle = counted
            prompts = [[(7 * row + i) % 60 + 3 for i in range(20)] for row in range(batch)]
            try:
                length = 8 if first == 2 else 24
                how = {"temperature": temperature, "seed": [1] * batch, "max_new_tokens": length, "batch": batch}
                outs = spec.generate(prompts, **how)
                if temperature == 0 or verifier in ("auto", "gumbel"):  # one text, whatever is drafted
                    wanted = Spec(plain_model, None, verifier="auto").generate(prompts, **how)
                    if [out.token_ids for out in outs] != [out.token_ids for out in wanted]:
                        raise RuntimeError(f"{setup}: the texts are not the CPU's")
            except RuntimeError as error:
                found.setdefault(str(setup), []).append(str(error))
                continue
            since = cycles - first + 1
            counts = [round(sum(count.values()) / since, 1) for count in (far_device.waits, far_device.launches)]
            places = {line: round(n / since, 2) for line, n in far_device.waits.most_common()}
            told = [*counts, places, far_device.outside // since]
            if (batch, first) == (BATCH, WARM):  # their texts may grow as one
                how |= {"seed": 1, "batch": 1}
                alone = [spec.generate(prompt, **how).stats.accepted for prompt in prompts[:2]]
                if [out.stats.accepted for out in outs[:2]] != alone:
                    told = f"{setup}: {batch} texts are drafted for otherwise than each alone"
            found.setdefault(str(setup), []).append(told)
    del keep
    return found


@pytest.fixture(scope="module")
def found():
    """In a process of its own: the device stays for good."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_nothing_mixes_devices_and_waits_do_not_grow(found, setup):
    """Nor is a batch drafted for otherwise than its texts alone."""
    assert not (faults := [counted for counted in found[str(setup)] if isinstance(counted, str)]), faults
    for counted in found[str(setup)][:2]:
        assert counted[0] <= SETUPS[setup], counted[2]


def test_a_cycle_launches_little_beside_its_forwards(found):
    most = {"topk": (40, 51, 54, 93), "gumbel": (59, 89, 106, 293.5)}
    for setup in GRAPHED:
        alone, batch, graphed, graphed_batch = found[str(setup)]
        counts = alone[3], batch[3], graphed[1], graphed_batch[1]
        assert all(count <= bound for count, bound in zip(counts, most[setup[2]], strict=True)), counts


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
