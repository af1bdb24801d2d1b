"""No network, one thread a process, as the suite runs on several, and a cache of its own."""

import os
import tempfile

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="treespec-tests-")
torch.set_num_threads(1)
