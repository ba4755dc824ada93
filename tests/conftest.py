"""Where there is no CUDA device, Triton's kernels run in its interpreter.

Triton chooses when a kernel is decorated, so this must be said before anything imports one.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
