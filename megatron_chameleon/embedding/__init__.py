"""Domain embeddings: mean hidden states of text windows at a layer of a proxy."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
