"""From conversations to a trained head."""
