"""The command nanovllm."""
