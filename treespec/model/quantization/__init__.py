"""Weights that are no plain matrix: quantised layers, quantising while loading, GGUF."""
