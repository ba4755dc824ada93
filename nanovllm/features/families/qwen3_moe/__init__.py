"""Qwen3-MoE: some layers are mixtures of experts. decoder.py has the model, ops.py the operators that it adds."""
