"""Proposers that draft with trained heads."""
