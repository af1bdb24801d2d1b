"""Measurements: MT-Bench, the benchmark, the acceptance lab, certificates, and fits to a head."""
