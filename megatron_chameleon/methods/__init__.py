"""Mixing methods. Each method is a module or folder that defines ``METHOD``."""
