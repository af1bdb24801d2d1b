"""`GateHead` as a row of the tables of heads, of what drafts with them, and of their training. It loads no torch."""

from treespec.heads.registry import HeadKind, Recipe, Training


def read(config, tensors):
    """Return config.json and the tensors as the class takes them; other projects' names would change here."""
    return config, tensors


GATE = HeadKind(
    name="gate",
    head="gate:GateHead",
    read="gate_row:read",
    marks="model_type=gate$",  # of a line of its config.json
    summary="a gate and an output layer for each token ahead",
    at_once=True,
    proposer="gate:GateProposer",
    training=Training(
        objective="treespec.train.losses.objectives:compute_depth_loss",
        recipe=Recipe(epochs=2, learning_rate=1e-3, weight_decay=0.0, warm_up=None),
    ),
)
if __name__ == "__main__":
    print(GATE)
