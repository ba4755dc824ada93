"""Uses of an engine that `LLM` offers beside `generate`: scores, embeddings, streams, many threads."""
