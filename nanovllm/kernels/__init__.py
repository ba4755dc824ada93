"""One operator a file: its Triton kernels, a typed wrapper that launches them, and its reference in plain torch."""
