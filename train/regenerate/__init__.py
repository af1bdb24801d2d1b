"""`treespec regenerate`: the target writes the answers that a head learns from."""
