"""Decide how much of each data domain a language model trains on, and train it."""

__version__ = "0.1.0"
