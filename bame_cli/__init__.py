"""Train N:M structured-sparse networks."""

__version__ = "0.1.0"
