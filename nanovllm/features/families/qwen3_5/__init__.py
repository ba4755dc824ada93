"""Qwen3.5: layers with a state per row, and gated attention. decoder.py has the model, ops.py its own operators."""
