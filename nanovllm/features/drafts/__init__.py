"""Speculative decoding: guesses the tokens that come next, so that a step can verify several. Loaded only if asked for.

options.py       checks the option speculative_config
speculation.py   plans drafts into steps, and learns how many of them the sampler draws, too
costs.py         how long steps take on this machine, and how many drafts pay
ngrams.py        a Drafter: copies from texts that were seen
draft_model.py   a Drafter: runs a smaller model
"""
