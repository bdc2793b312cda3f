"""Process groups, seeds, and megatron-core on machines without CUDA."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
