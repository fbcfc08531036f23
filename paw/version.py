"""The version of this package. Imports nothing, so that any module can ask for it."""

__version__ = "0.1.0"
