"""Given tokens and a draft model together: `--drafter suffix+eagle:HEAD`."""
