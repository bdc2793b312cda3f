"""litgpt, whose data modules mix by litdata's ``CombinedStreamingDataset``."""

from __future__ import annotations

import json

from megatron_chameleon.exports.content import Export


def combined_streaming_dataset(export: Export) -> str:
    """Arguments of ``CombinedStreamingDataset`` as JSON, with names in place of the data sets.

    litdata reads chunks of its own and not .bin files, so the reader puts a ``StreamingDataset``
    in the place of each name. ``iterate_over_all`` is false, since litdata refuses weights
    otherwise.
    """
    drawn = export.drawn()
    arguments = {
        "datasets": [domain.name for domain in drawn],
        "weights": [domain.weight for domain in drawn],
        "iterate_over_all": False,
    }
    return json.dumps(arguments, indent=2, ensure_ascii=False) + "\n"
