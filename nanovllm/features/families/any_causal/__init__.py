"""Any causal model of transformers. transformers' modules compute it, with this engine's attention and matrices.

config.py says which models these are, layers.py puts our layers in the places of theirs, attend.py is their attention,
and decoder.py the model. proof.py compares an untested architecture with transformers' own attention.
"""
