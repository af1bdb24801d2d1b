"""Token trees, and the policies that choose their shapes."""
