"""The models: their configurations, files, weights and layers."""
