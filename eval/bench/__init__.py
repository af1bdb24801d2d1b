"""The benchmark: forwards, cycles and peers in one run."""
