"""JSON files that people edit by hand."""

from __future__ import annotations

import json
from typing import Any


def check_names_are_unique(text: str) -> None:
    """No object has a name twice: json would keep the last of the two without a word."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(names) == len(set(names)), names
        return dict(pairs)

    json.loads(text, object_pairs_hook=unique)
