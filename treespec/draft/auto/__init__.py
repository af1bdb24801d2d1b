"""`auto`: a cost model of the cycle, which chooses the tree and whether to draft at all."""
