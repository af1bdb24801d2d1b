"""Measured by running the loop: times, rates, a calibration."""
