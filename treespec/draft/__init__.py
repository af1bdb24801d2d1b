"""Drafters: whatever proposes a token tree."""
