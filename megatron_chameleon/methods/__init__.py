"""Mixing methods: one module or folder each, discovered by its ``METHOD``."""
