"""Find the lines of raw text from which documents of a corpus were read.

A corpus records its sources, but not the line of each document. The sources are read again, and
their texts are compared with the documents' by hash. A line is thus reported only if it holds
exactly the text of the document.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.provenance import in_folder
from megatron_chameleon.artifacts.record import check_values
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.shards import text_digest
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.errors import UserError
from megatron_chameleon.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class _RecordedSources:
    """Options of preprocess_data in a corpus.json."""

    source: SourceOptions
    domains: DomainOptions = dataclasses.field(default_factory=DomainOptions)
    drop_duplicates: bool = True


def source_lines(corpus: Corpus, digests: Mapping[str, Set[bytes]]) -> dict[tuple[str, bytes], str]:
    """Find texts in the sources of ``corpus``.

    Args:
        corpus: corpus that preprocess_data wrote, or that links the token files of such a corpus.
        digests: domain -> ``text_digest`` of each text to find.

    Returns:
        (domain, digest) -> 'FILE:LINE' of the first line with this text, counted from 1; of a
        table, 'FILE:ROW'. If the corpus keeps duplicates, all lines with the text, separated by
        commas; in a subset, also lines after the document that ends the domain. Texts that are not
        found are missing: the file has changed, or the tokenizer does not decode tokens to exactly
        the text that was encoded.

    Raises:
        UserError: if the corpus does not record its sources, or a source cannot be read.
    """
    corpus = _preprocessed(corpus, digests)
    options: dict[str, Any] = corpus.provenance.options
    where = f"{corpus.root / corpus.FILE_NAME}: provenance.options"
    recorded = check_values(where, _RecordedSources, options, corpus.RESTORE)
    lines: dict[tuple[str, bytes], str] = {}
    missing = {name: set(some) for name, some in digests.items() if some}
    with in_folder(corpus.provenance.working_folder):
        sources = find_sources(recorded.source, recorded.domains)
        needed = [n for n, source in enumerate(sources) if source.domain in (None, *digests)]
        total = sum(sources[number].bytes for number in needed)
        with progress_bar(total, "B", "finding source lines") as bar:
            reader = DocumentReader(recorded.source, sources, recorded.domains, bar.update)
            for number in needed:
                domain = sources[number].domain
                for line, document in reader.read_numbered(Chunk(number)):
                    if recorded.drop_duplicates and not (
                        missing if domain is None else missing.get(domain)
                    ):
                        break  # all texts are found
                    key = document.domain, text_digest(document.text.encode())
                    if key[1] not in digests.get(document.domain, ()):
                        continue
                    place = f"{sources[number].name}:{line}"
                    if key not in lines:
                        lines[key] = place
                        missing[key[0]].discard(key[1])
                        if not missing[key[0]]:
                            del missing[key[0]]
                    elif not recorded.drop_duplicates:
                        lines[key] += f", {place}"
    return lines


def _preprocessed(corpus: Corpus, names: Collection[str]) -> Corpus:
    """Return the corpus of preprocess_data that holds the training text of ``names``.

    It is ``corpus`` itself, or the corpus whose token files it links (``import_corpus --corpus``).

    Raises:
        UserError: if there is none, or it cannot be read or has changed.
    """
    made_by = corpus.provenance
    if made_by.options.get("source", {}).get("input"):
        return corpus
    folder, expected = made_by.options.get("corpus"), made_by.inputs.get("corpus")
    if folder is not None and expected is not None:
        with in_folder(made_by.working_folder):
            linked = Corpus.load(Path(os.path.abspath(folder)))
        if linked.hash != expected:
            raise UserError(
                f"--source-lines: the text of {corpus.root} is that of {linked.root}, which has "
                "changed since; restore that corpus"
            )
        same = (
            name in linked.domains
            and linked.domains[name].train.sha256 == corpus.domains[name].train.sha256
            for name in names
        )
        if all(same):  # not the clusters of another corpus
            return _preprocessed(linked, names)
    raise UserError(
        f"--source-lines: {corpus.root} does not record the raw text of its documents; only "
        "corpora of preprocess_data do, and those that import_corpus --corpus makes from them"
    )
