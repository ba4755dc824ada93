"""Families of models whose layers differ from the dense decoder's. models/model_config.py names their decoders."""
