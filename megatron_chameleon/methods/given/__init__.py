"""Weights that a person has, brought to the domains of a corpus."""
