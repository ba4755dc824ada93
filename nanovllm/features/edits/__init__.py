"""Edits of logits before a token is sampled: penalties, biases, masks, grammars. load.py imports it when first used."""
