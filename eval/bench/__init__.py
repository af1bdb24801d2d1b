"""`treespec bench`: forwards, cycles and peers in one run."""
