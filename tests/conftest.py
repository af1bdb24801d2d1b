"""One thread a process: the suite runs on several."""

import torch

torch.set_num_threads(1)
