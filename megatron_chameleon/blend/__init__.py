"""Tokens and weights in, samples out: the blended index, the data sets, the order of batches."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
