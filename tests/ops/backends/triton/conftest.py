"""Without a GPU the kernels run on Triton's interpreter, chosen before Triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
