"""The loop: draft, one forward, verify, commit; and what a prompt becomes on its way through it."""
