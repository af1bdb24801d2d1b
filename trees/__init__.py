"""What a token tree is, and the policies that shape it."""
