"""Checkpoints in megatron's torch_dist format: written atomically, loadable under any layout."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
