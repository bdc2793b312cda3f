"""Options of tools/gather_installed_text.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.options.ranges import Count, LargeCount


@dataclasses.dataclass(frozen=True)
class GatherOptions:
    """Real text in named domains, from the packages of this Python environment."""

    output_dir: Path
    """Folder for one <domain>.jsonl per domain and gathered.json, which says what is in them."""
    roots: tuple[Path, ...] = ()
    """Folders to read; default: this environment's site-packages."""
    num_domains: Count = 8
    """How many domains to keep: the first of the ranked list that have enough text."""
    max_bytes_per_domain: LargeCount = 5_000_000
    """No domain takes more than this, so that none dwarfs the others."""
    min_bytes_per_domain: int = 1_500_000
    """A domain with less is replaced: a tenth of it held out is then 20,000 tokens or more."""
    min_documents_per_domain: int = 50
    """A domain with fewer documents is replaced by the next of the ranked list."""
    min_document_characters: int = 200
    """Shorter files are left out."""
    max_document_bytes: LargeCount = 100_000
    """Longer files are cut at the last line that fits."""
