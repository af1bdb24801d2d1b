"""A certificate that the text is the target's own."""
