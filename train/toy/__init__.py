"""A toy that trains in minutes: conversations out of the standard library, and a small target."""
