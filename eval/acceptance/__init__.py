"""The acceptance lab: acceptance rates of verification schemes, their optima, and exact τ."""
