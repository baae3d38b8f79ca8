import os

# Before anything imports Triton, whose kernels the tests run without a GPU; XQUANT_TEST_DEVICE=cuda runs
# those of tests/kernels/test_triton*.py on one.
if os.environ.get("XQUANT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

# Tiny models lose more time in handing work to threads than they gain.
torch.set_num_threads(1)
