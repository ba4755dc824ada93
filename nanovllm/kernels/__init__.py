"""One kernel a file: the Triton kernel, a thin typed wrapper, and a plain-torch reference (the CPU path, the oracle)."""
