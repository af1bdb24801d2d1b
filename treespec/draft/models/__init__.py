"""Proposers that draft with language models."""
