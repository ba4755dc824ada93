"""LoRA adapters: one is merged into the weights while they are read, and requests are grouped by theirs."""
