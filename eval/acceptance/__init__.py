"""The acceptance lab: acceptance rates and their optima."""
