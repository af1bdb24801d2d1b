"""`python -m treespec.train` is `treespec train`, for `accelerate launch -m`."""

import sys

from treespec.cli import main

sys.argv.insert(1, "train")
main()
