"""Applications on top of the engine: the command `nanovllm`, jobs, Ray, benchmarks, the window, lm-eval."""
