"""Tables that `pages.py` puts into the pages."""
