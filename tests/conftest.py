"""No network, and one thread a process: the suite runs on several."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
