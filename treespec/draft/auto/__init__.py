"""`auto`: the cost model of a cycle, and the tree and the choices that follow from it."""
