"""GPT on megatron-core: sizes, layer parts, initial weights, and reading a trained model out."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
