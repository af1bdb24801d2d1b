"""`python -m treespec` is `treespec`."""

from treespec.cli import main

if __name__ == "__main__":
    main()
