"""`treespec tree`: a static tree fitted to a head."""

from treespec.cli.options import takes
from treespec.eval.tree_config import TreeConfig


@takes(TreeConfig)
def tree(config: TreeConfig) -> None:
    """Measure how often a head is right, by depth and rank, and write the best tree for that: --tree FILE.json."""
    from treespec.cli.progress import with_progress
    from treespec.eval.tree import make_tree

    made, table, length = with_progress(lambda report: make_tree(config, report))
    for depth, row in enumerate(table.tolist(), start=1):
        print(f"depth {depth}: " + " ".join(f"{share:.1%}" for share in row))
    print(f"A tree of {made.size} nodes, {made.max_depth} deep, expected to give {length:.2f} tokens a cycle")
    print(f"It is in {config.out}: --tree {config.out}")
