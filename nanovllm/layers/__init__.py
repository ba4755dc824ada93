"""What a transformer is made of. Each layer knows how it is sharded and which checkpoint tensors fill it."""
