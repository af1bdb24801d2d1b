"""The page of a measurement: one HTML file that needs no other."""
