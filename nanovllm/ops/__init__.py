"""The mathematics of the engine in plain torch. Kernels for CPUs and GPUs are compared with these references."""
