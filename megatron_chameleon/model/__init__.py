"""GPT on megatron-core: sizes, layers, initial weights, and forward-only inference."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
