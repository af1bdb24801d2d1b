"""MT-Bench: acceptance length and speedup."""
