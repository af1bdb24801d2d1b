"""Files and names of an earlier treespec, which every later one reads: README.md says what they are."""
