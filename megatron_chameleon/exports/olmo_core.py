"""OLMo-core's source mixtures."""

from __future__ import annotations

import json
import math
from typing import Any

from megatron_chameleon.errors import UserError
from megatron_chameleon.exports.content import Export, WeightedDomain


def source_list(export: Export) -> str:
    """A ``SourceMixtureList`` as JSON, with the .bin files of the corpus.

    These files are what OLMo-core reads: token ids without a header, every document ended by the
    end-of-document token. Its ``dtype`` is ``uint16`` or ``uint32`` (for our int32: no id is
    negative). ``max_repetition_ratio``, without which no text is repeated, is given with a token
    budget: the passes over the domain that it asks for, rounded up.

    Raises:
        UserError: for a path that OLMo-core would take for a pattern, or a split without text.
    """
    drawn = export.drawn_from(export.split)
    if not drawn:
        raise UserError(f"no domain with a weight has {export.split} tokens")
    sources = [_source(domain, export) for domain in drawn]
    return json.dumps({"sources": sources}, indent=2, ensure_ascii=False) + "\n"


def _source(domain: WeightedDomain, export: Export) -> dict[str, Any]:
    path = f"{domain.prefixes[export.split]}.bin"
    if "*" in path:
        raise UserError(f"{path}: OLMo-core takes '*' for a pattern; move the corpus")
    source: dict[str, Any] = {
        "source_name": domain.name,
        "target_ratio": domain.weight,
        "paths": [path],
    }
    if export.token_budget is not None:
        passes = export.token_budget * domain.weight / domain.tokens[export.split]
        source["max_repetition_ratio"] = float(max(1, math.ceil(passes)))
    return source
