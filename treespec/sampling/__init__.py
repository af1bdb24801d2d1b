"""The distribution of each text: what changes the logits before temperature, top-k and the rest."""
