"""Evaluation: held-out perplexity per domain and downstream accuracy."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
