"""Tokenize raw text into Megatron's .bin/.idx files."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
