"""What requests ask to be done to their logits before a token is sampled. Imported when the first one asks."""
