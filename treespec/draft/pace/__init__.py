"""What drafting costs and brings."""
