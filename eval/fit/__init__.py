"""Fits to a target and what drafts for it: calibrations, trees, skip sets."""
