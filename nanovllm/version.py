"""The version, in a module of its own: setuptools reads it without importing the package."""

__version__ = "0.1.0"
