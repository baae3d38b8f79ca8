import os

# Before anything imports Triton, whose kernels the tests run without a GPU.
os.environ["TRITON_INTERPRET"] = "1"

import torch

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)
