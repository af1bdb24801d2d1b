"""`treespec tree`: a static tree fitted to a head."""

from treespec.cli.early import begin, check_questions, check_text
from treespec.cli.options import takes
from treespec.eval.config import TreeConfig
from treespec.files.atomic import check_writable


@takes(TreeConfig)
def tree(config: TreeConfig) -> None:
    """Measure a head's accuracy by depth and rank, and write its best tree (--tree FILE.json)."""
    # 1. Check what needs no weights.
    check_writable(config.out, "--out")
    check_text(config.text)
    check_questions(config.questions)
    begin(config, [f"head:{config.head}"])
    from treespec.cli.terminal import remark, show_result, with_progress
    from treespec.decoding.stats import TAU
    from treespec.eval.fit import make_tree
    from treespec.eval.report import Report, Table

    # 2. Measure, and make the tree.
    made, table, length = with_progress(lambda report: make_tree(config, report))

    # 3. Show the accuracies and the tree's expected τ.
    rows = []
    for depth, row in enumerate(table.tolist(), start=1):
        rows.append(
            {"Depth": str(depth)} | {str(r): f"{share:.1%}" for r, share in enumerate(row, 1)}
        )
    title = "How often the head's guess of each rank is right, by depth"
    expected = f"expected τ {length:.2f} ({TAU})"
    promise = f"A tree of {made.size} nodes, {made.max_depth} deep, {expected}."
    show_result(Report([Table(title, ["Depth"], rows)], [promise]))
    remark(f"It is in {config.out}: --tree {config.out}")
