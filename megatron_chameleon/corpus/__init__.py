"""Tokenize raw text into Megatron's .bin/.idx files."""
