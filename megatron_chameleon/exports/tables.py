"""A table of all domains, for a person or a script."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.exports.content import Export


def csv_table(export: Export) -> str:
    """Comma-separated values (RFC 4180) with a header: domain, weight, tokens and prefixes."""
    rows = _rows(export)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_table(export: Export) -> str:
    """The same rows as a JSON list of objects."""
    return json.dumps(_rows(export), indent=2, ensure_ascii=False) + "\n"


def _rows(export: Export) -> list[dict[str, Any]]:
    """A row for every domain of the corpus, those without weight included."""
    return [
        {"domain": domain.name, "weight": domain.weight}
        | {f"{split}_tokens": domain.tokens[split] for split in SPLITS}
        | {f"{split}_prefix": domain.prefixes[split] for split in SPLITS}
        for domain in export.domains
    ]
