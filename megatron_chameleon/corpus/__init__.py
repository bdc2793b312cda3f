"""Raw text in, tokens on disk out, in Megatron's .bin/.idx format."""

from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()
