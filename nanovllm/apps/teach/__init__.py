"""Jobs that write what a teacher expects in the place of each token of texts, for a smaller model to learn from."""
