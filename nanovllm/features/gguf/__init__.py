"""Models in GGUF, the format of llama.cpp: one file, or several, with configuration, tokenizer and weights."""
