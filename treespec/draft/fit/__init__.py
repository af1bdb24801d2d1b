"""What is found out by running the loop: times, rates, a calibration."""
