"""One kernel a file: the Triton kernel, a thin typed wrapper, and a plain-torch reference: CPU path and oracle."""
