"""What is fitted to a target and its drafts: calibration, trees, skip sets."""
