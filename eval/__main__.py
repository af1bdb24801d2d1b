"""`python -m treespec.eval` is `treespec eval`, for `accelerate launch -m`."""

import sys

from treespec.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "eval")
    main()
