"""Text to corpus: documents are read, split, deduplicated, tokenised and written by domain."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator

from megatron_chameleon.artifacts import SPLITS, Corpus, Stopwatch, provenance
from megatron_chameleon.corpus.domain_writer import DomainWriter, DomainWriters
from megatron_chameleon.corpus.folder import CorpusFolder
from megatron_chameleon.corpus.indexed import token_type
from megatron_chameleon.corpus.readers import Document, DocumentReader
from megatron_chameleon.corpus.sources import SourceFile
from megatron_chameleon.corpus.split import parse_split
from megatron_chameleon.corpus.summary import closing_words
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.preprocess import PreprocessOptions
from megatron_chameleon.progress import progress_bar

# Enough text to keep all cores busy on one batch, little enough to hold with its encodings.
_BATCH_CHARACTERS = 2_000_000


def preprocess_data(options: PreprocessOptions) -> None:
    """Write the corpus that ``options`` ask for, and print what is in it.

    Raises:
        UserError: for input that cannot be read or makes no corpus; nothing is left of it then.
    """
    shares = parse_split(options.split)
    tokenizer = load_tokenizer(options.tokenizer_model, options.eod_token)
    reader = DocumentReader(options.source, options.domain_key)
    _check_sources(reader.sources, options.domain_key)
    with CorpusFolder(options.output, options.overwrite) as folder:
        dtype = token_type(tokenizer.vocab_size)
        stopwatch = Stopwatch()
        writers = DomainWriters(folder.partial, dtype, shares, options.drop_duplicates)
        _tokenize(reader, tokenizer, writers)
        _check_lines(reader, options.source.max_malformed_share)
        _check_domains(writers, reader.sources, options.min_tokens_per_split)
        domains = {name: writer.finish() for name, writer in writers.items()}
        shutil.copyfile(tokenizer.path, folder.partial / tokenizer.identity.file)
        Corpus(
            root=folder.partial,
            tokenizer=tokenizer.identity,
            dtype=dtype,
            domains=domains,
            provenance=provenance(options, {"tokenizer": tokenizer.sha256, **reader.hashes}),
            cost=stopwatch.cost(),
        ).save()
        folder.publish()
    corpus = Corpus.load(options.output)
    print(closing_words(corpus, dict(writers.items()), reader.malformed))


def _check_sources(sources: list[SourceFile], domain_key: str | None) -> None:
    """Refuse files whose domain nobody tells, and a domain key that nothing would ask for."""
    without = [source for source in sources if source.domain is None]
    if without and domain_key is None:
        raise UserError(
            f"--input {without[0].path}: of which domain? Give it as NAME={without[0].path}, or "
            "--domain-key for a key in its lines"
        )
    if domain_key is not None and not without:
        raise UserError(
            f"--domain-key {domain_key} has no use here: every --input names its domain; "
            "leave out one or the other"
        )


def _tokenize(reader: DocumentReader, tokenizer: Tokenizer, writers: DomainWriters) -> None:
    for source in reader.sources:
        if source.domain is not None:
            writers.of(source.domain)  # in the order given, and known even if it stays empty
    with progress_bar(reader.total_bytes, "B", "tokenizing") as bar:
        reader.on_bytes = bar.update
        for batch in _batches(reader):
            _write_batch(batch, tokenizer, writers)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_batch(batch: list[Document], tokenizer: Tokenizer, writers: DomainWriters) -> None:
    admitted = []
    for document in batch:
        writer = writers.of(document.domain)
        split = writer.admit(document.text)
        if split is not None:
            admitted.append((writer, split, document.text))
    encoded = tokenizer.encode_batch([text for _, _, text in admitted])
    for (writer, split, _), tokens in zip(admitted, encoded, strict=True):
        writer.add(split, tokens)


def _check_lines(reader: DocumentReader, max_malformed_share: float) -> None:
    reader.malformed.check(max_malformed_share)
    if reader.malformed.count:
        warnings.warn(f"{reader.malformed.describe()}; they are left out", stacklevel=3)


def _check_domains(writers: DomainWriters, sources: list[SourceFile], min_tokens: int) -> None:
    domains = dict(writers.items())
    if not domains:
        raise UserError(f"there is no text in {sources[0].path}; correct --input")
    for name, writer in domains.items():
        if not any(writer.documents(split) for split in SPLITS):
            paths = [str(source.path) for source in sources if source.domain in (name, None)]
            raise UserError(
                f"domain '{name}' is empty: there is no text for it in {' or '.join(paths[:3])}; "
                "give it some, or leave it out"
            )
        _check_splits(name, writer, min_tokens)


def _check_splits(name: str, writer: DomainWriter, min_tokens: int) -> None:
    documents = {split: writer.documents(split) for split in SPLITS}
    for split in SPLITS:
        if documents[split] == 0:
            raise UserError(
                f"domain '{name}' has no document in {split}, of {sum(documents.values())} in all; "
                "give it more documents, or other shares by --split"
            )
        if writer.tokens(split) < min_tokens:
            raise UserError(
                f"domain '{name}' has {writer.tokens(split)} tokens in {split}, fewer than "
                f"--min-tokens-per-split {min_tokens}; give it more text or a larger share"
            )
