"""Sweeps: the same mixture for several values of one hyperparameter at a time."""
