"""How a transformers decoder scores a tree: its layers, masks, attention, weights."""
