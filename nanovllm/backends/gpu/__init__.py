"""Runs models on a GPU: Triton kernels, flash-attn, CUDA graphs. It loads only when it is chosen."""
