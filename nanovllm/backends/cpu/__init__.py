"""Runs models on a CPU by our C++ kernels. It loads only when it is chosen."""
