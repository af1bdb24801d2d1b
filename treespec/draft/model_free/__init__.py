"""Drafters without a model."""
