"""Mixtures as papers print them."""
