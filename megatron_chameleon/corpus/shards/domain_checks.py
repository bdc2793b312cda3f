"""Domains that no mixture could be judged on are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_chameleon.artifacts import SPLITS, Domain
from megatron_chameleon.corpus.reading.sources import Source
from megatron_chameleon.errors import UserError


def check_domains(
    domains: Mapping[str, Domain], sources: Sequence[Source], min_tokens: int
) -> None:
    """Every domain needs documents in every split.

    Args:
        domains: what was written.
        sources: what was read, to be named.
        min_tokens: that each split of a domain needs.

    Raises:
        UserError: naming the first domain and split that has too little, and the way out.
    """
    if not domains:
        raise UserError(f"there is no text in {sources[0].name}; correct --input")
    for name, domain in domains.items():
        documents = sum(domain.split(split).documents for split in SPLITS)
        if documents == 0:
            names = [source.name for source in sources if source.domain in (name, None)]
            raise UserError(
                f"domain '{name}' is empty: there is no text for it in {' or '.join(names[:3])}; "
                "give it some, or leave it out"
            )
        for split in SPLITS:
            part = domain.split(split)
            if part.documents == 0:
                raise UserError(
                    f"domain '{name}' has no document in {split}, of {documents} in all; give it "
                    "more documents, or other shares by --split"
                )
            if part.tokens < min_tokens:
                raise UserError(
                    f"domain '{name}' has {part.tokens} tokens in {split}, fewer than "
                    f"--min-tokens-per-split {min_tokens}; give it more text or a larger share"
                )
