"""A target's layers on a CPU: packed weights, fused layers, experts."""
