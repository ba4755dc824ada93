"""The layers of a transformer. Each knows how ranks share it, and which checkpoint tensors fill it."""
