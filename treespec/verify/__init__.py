"""Multi-draft verification schemes and the walks over them."""
