"""Checkpoints in megatron's torch_dist format: written whole or not at all, read by any layout."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
