"""Domain embeddings: windows of text through the first layers of a proxy, averaged."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
