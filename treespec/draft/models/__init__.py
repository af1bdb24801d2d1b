"""Proposers over language models."""
