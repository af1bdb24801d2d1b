"""The target `demo`: a chat model that people know, fetched once from the hub or the package index."""
