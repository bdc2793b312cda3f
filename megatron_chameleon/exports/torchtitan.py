"""torchtitan's interleaved data sets."""

from __future__ import annotations

import json

from megatron_chameleon.errors import UserError
from megatron_chameleon.exports.content import Export


def sources(export: Export) -> str:
    """Keyword arguments of ``HFDataSource``, one set a domain, under the key ``sources``.

    ``InterleavedHuggingFaceTextDataLoader`` draws packed sequences by these weights, so that they
    are shares of the tokens. torchtitan reads text and not .bin files: each domain is to be
    registered in its ``DATASETS``, where it looks names up in lower case.

    Raises:
        UserError: for two domains whose names differ in case alone.
    """
    drawn = export.drawn()
    names: dict[str, str] = {}
    for domain in drawn:
        other = names.setdefault(domain.name.lower(), domain.name)
        if other != domain.name:
            raise UserError(
                f"'{other}' and '{domain.name}' are one name for torchtitan, which reads names in "
                "lower case; rename one of them when preprocessing (--rename-domain)"
            )
    listed = [{"dataset": domain.name.lower(), "weight": domain.weight} for domain in drawn]
    return json.dumps({"sources": listed}, indent=2, ensure_ascii=False) + "\n"
