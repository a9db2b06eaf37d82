"""mtjax: train large transformers in JAX, with the same numbers on any device layout."""

__version__ = "0.1.0"
