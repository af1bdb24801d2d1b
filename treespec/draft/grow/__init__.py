"""How trees grow from draft logits: one grower for each policy."""
