"""Trainable draft heads."""
