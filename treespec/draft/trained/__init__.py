"""Proposers over trained heads."""
