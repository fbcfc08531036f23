"""PaW: a lean trainer for language agents that learn to act and to predict their world at once (arXiv 2606.02388)."""

__version__ = "0.1.0"
