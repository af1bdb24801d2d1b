"""Growing a tree, one policy a file."""
