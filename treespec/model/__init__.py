"""How a transformers decoder holds a tree."""
