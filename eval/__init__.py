"""MT-Bench: acceptance length and speedup. The acceptance lab: acceptance rates and their optima."""
