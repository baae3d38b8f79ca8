import torch

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)
