"""The models, found by the `architectures` of their config.json."""
