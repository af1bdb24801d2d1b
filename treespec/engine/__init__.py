"""The loop (draft, one forward, verify, commit), and what it takes and returns: requests, pieces, outputs."""
