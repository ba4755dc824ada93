"""Several ranks: processes that follow rank 0, and what they say to each other."""
