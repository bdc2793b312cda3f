"""Is the model better? Held-out perplexity per domain."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
