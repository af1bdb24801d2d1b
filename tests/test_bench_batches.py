"""Throughput by the size of the batch, as the benchmark measures it."""

from evaluating import FILES, save_models

from treespec.eval.bench.config import BenchConfig
from treespec.eval.bench.run import bench


def test_batches_of_any_size_have_the_same_tokens_and_a_line_each(tmp_path):
    save_models(tmp_path)
    config = BenchConfig(
        **{name: str(tmp_path / file) for name, file in FILES.items()},
        out=str(tmp_path / "out"),
        verifier="topk,rrs@2x2",
        max_new_tokens=6,
        contexts="20",
        rounds=2,
        batches="2,1",
        dtype="float32",
    )
    part = bench(config)
    table = (tmp_path / "out" / "bench.md").read_text().split("## Batches")[1]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert len(part["batches"]) == len(lines) - 2 == 12
    tokens = {}
    for row, line in zip(part["batches"], lines[2:], strict=True):
        assert line[:4] == [row["name"], f"{row['temperature']:g}", str(row["batch"]), str(row["tokens"])]
        assert line[4].startswith(f"{row['tokens_per_second']['value']:.1f}")
        tokens.setdefault((row["name"], row["temperature"]), set()).add(row["tokens"])
        for over, one in (("over_one_token", row["name"] == "one token"), ("over_smallest", row["batch"] == 1)):
            assert (row[over] == {"value": 1.0, "low": None, "high": None}) == one
    assert all(len(found) == 1 for found in tokens.values())
