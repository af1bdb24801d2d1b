"""The distribution that a request samples from: logits processors, temperature, top-k and the like, Gumbel noise."""
