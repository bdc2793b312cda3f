"""Training: from samples and a model to checkpoints and metrics."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
