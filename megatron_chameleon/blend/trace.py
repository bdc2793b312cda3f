"""List the documents that the steps of a training run read, from the run's record alone.

Training computes the order of its samples from the options and the mixture weights, both of which
run.json records. The same order functions list the token ranges of every sample here, without
reading tokens; the documents follow from the .idx files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numba import njit
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, TrainingRun
from megatron_chameleon.artifacts.files import replacing, require_new, require_writable
from megatron_chameleon.artifacts.provenance import in_folder
from megatron_chameleon.artifacts.record import Count, Positive, check_values
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.options import DataOptions, TraceOptions
from megatron_chameleon.blend.sampler import place_in_step
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import Domains, open_data_path, open_domains
from megatron_chameleon.corpus.shards import text_digest
from megatron_chameleon.corpus.source_lines import source_lines
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer, load_tokenizer
from megatron_chameleon.corpus.windows import split_at_edges
from megatron_chameleon.errors import UserError
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.storage import absolute

# Number of tokens of the samples whose ranges are listed at a time.
_BLOCK_TOKENS = 1 << 26
_ROWS_PRINTED = 40
_TEXT_PRINTED = 60
_STEPS_PRINTED = 12
_HINT = "pass another --run; megatron-chameleon pretrain_gpt writes this file"

# (domain, document): the position of a domain in the data, and the number of a document in its file
Documents = Mapping[int, NDArray[np.int64]]
# Starts again with the first table at each call.
Tables = Callable[[], Iterator[pd.DataFrame]]


@dataclasses.dataclass(frozen=True)
class _RecordedRun:
    """The options in run.json that determine the samples."""

    seq_length: Positive
    global_batch_size: Positive
    seed: Count
    data: DataOptions
    corpus: str | None = None
    target_tokens: int | None = None


class RunTrace:
    """The samples of a training run, in the run's order.

    Args:
        run: record of the run.
        corpus: folder of the corpus, if it was moved.
        data_path: value of ``--data-path``, if the files were moved.
        tokenizer_model: the tokenizer, if it was moved; only texts need it.

    Raises:
        UserError: if the run does not record its options, or if its data were changed or are not
            found.
    """

    def __init__(
        self,
        run: TrainingRun,
        corpus: Path | None = None,
        data_path: str | None = None,
        tokenizer_model: Path | None = None,
    ) -> None:
        self.run = run
        where = f"{run.root / run.FILE_NAME}: provenance.options"
        self.options = options = check_values(where, _RecordedRun, run.provenance.options, _HINT)
        self.num_samples = run.train_iters * options.global_batch_size
        self.corpus: Corpus | None = None
        uses_data_path = options.data.uses_data_path
        if (corpus if uses_data_path else data_path) is not None:
            flags = ("--corpus", "--data-path")
            raise UserError(
                f"{flags[not uses_data_path]}: the run was trained with {flags[uses_data_path]}; "
                "pass that instead, if the files were moved"
            )
        # New paths are relative to the current folder, and recorded ones to that of the run.
        moved = _absolute(DataPath.parse(data_path)) if data_path is not None else None
        corpus = corpus and corpus.absolute()
        self._tokenizer_model = tokenizer_model and tokenizer_model.absolute()
        with in_folder(run.provenance.working_folder):
            data, by_size = self._open(corpus, moved)
            recorded = run.provenance.inputs.get("corpus")
            if data.hash != recorded or {*data.names} != {*run.mixture}:
                raise UserError(
                    f"{data.where} is not the data of {run.root}, or has changed (SHA-256 "
                    f"{data.hash[:8]}, not {str(recorded)[:8]}); restore it, or pass --corpus or "
                    "--data-path if it was moved"
                )
            run_tokens = self.num_samples * options.seq_length
            self.data = data.cut(run_tokens, options.target_tokens)
            self.samples = BlendedTokens(
                data=self.data,
                schedule=self._schedule(),
                num_samples=self.num_samples,
                seq_length=options.seq_length,
                seed=options.seed,
                permutation=options.data.permutation,
                by_size=by_size,
            )
        self._prefixes = [str(domain.prefix) for domain in self.data.domains]
        self.numbers = {name: number for number, name in enumerate(self.data.names)}
        self._check_order()

    def _open(self, corpus: Path | None, moved: DataPath | None) -> tuple[Domains, bool]:
        """Open the data, and return whether the samples are blended by size."""
        options, run = self.options.data, self.run
        cache = options.object_storage_cache_path and options.object_storage_cache_path.absolute()
        if not options.uses_data_path:
            folder = corpus or Path(self.options.corpus or "").absolute()
            if not Corpus.exists(folder):
                raise UserError(
                    f"{folder}: no corpus here, from which {run.root} was trained; pass --corpus "
                    "if it was moved"
                )
            self.corpus = Corpus.load(folder)
            data = open_domains(self.corpus, cache)
            return data, len(data.domains) == 1
        path = moved or _absolute(DataPath.read(options.data_path, options.data_args_path))
        if self._tokenizer_model is None and options.tokenizer_model is not None:
            self._tokenizer_model = options.tokenizer_model.absolute()
        data = open_data_path(path, options.split, run.tokenizer, cache)
        # A moved path may have other weights; those of the run are recorded. But whether it had any
        # decides the order, and only the recorded path tells.
        trained = path if options.data_path is None else DataPath.parse(options.data_path)
        return data, trained.weights is None

    def _schedule(self) -> MixtureSchedule:
        try:
            return MixtureSchedule.from_record(self.run.mixture_phases, self.data.names)
        except (KeyError, ValueError) as error:
            where = f"{self.run.root / self.run.FILE_NAME}: field mixture_phases"
            problem = f"no weight of {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{where}: {problem}; {_HINT}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens.

        Raises:
            UserError: if it is missing, or is another tokenizer.
        """
        path, data, run = self._tokenizer_model, self.options.data, self.run
        if self.corpus:
            return corpus_tokenizer(self.corpus, path)
        if path is None or not path.exists():
            raise UserError(
                f"{path}: no tokenizer here, with which {run.root} was trained; pass "
                "--tokenizer-model if it was moved"
            )
        tokenizer = load_tokenizer(path, data.eod_token, data.tiktoken_pattern)
        if tokenizer.sha256 != run.tokenizer.sha256:
            raise UserError(
                f"{path} is not the tokenizer with which {run.root} was trained (its hash "
                "differs); pass the original as --tokenizer-model"
            )
        return tokenizer

    def _check_order(self) -> None:
        """Check that this release has the run's order, by its version and the domains' counts."""
        run, version = self.run, self.run.order_version
        if version != self.samples.order_version:
            raise UserError(
                f"{run.root} has version {version} of the sample order, but this release has "
                f"version {self.samples.order_version}; use the release that trained it"
            )
        actual = {name: tokens.actual for name, tokens in run.domain_tokens.items()}
        num_samples = sum(actual.values()) // self.options.seq_length
        counts = (self.samples.counts(num_samples) * self.options.seq_length).tolist()
        for name, count in zip(self.data.names, counts, strict=True):
            if actual.get(name) != count:
                raise UserError(
                    f"{run.root / run.FILE_NAME} records {actual.get(name)} tokens of '{name}', "
                    f"but the order implies {count}; use the release that trained the run"
                )

    def steps(self, wanted: tuple[int, int] | None) -> tuple[int, int]:
        """Return the first and last of the ``wanted`` steps; None stands for all steps so far.

        Raises:
            UserError: if the run has not done all of them.
        """
        run = self.run
        if run.step == 0:
            raise UserError(
                f"{run.root / run.FILE_NAME} records no finished step; wait until training has "
                "written the first checkpoint"
            )
        first, last = wanted or (1, run.step)
        if last > run.step:
            raise UserError(
                f"--steps {first}:{last}: {run.root} is at step {run.step} of {run.train_iters}; "
                f"pass steps from 1 to {run.step}"
            )
        return first, last

    def tokens(
        self, domain: int, document: int, first: int = 0, stop: int | None = None
    ) -> NDArray[np.integer]:
        """Return the tokens of a document of a domain's files, or a range of them.

        Raises:
            UserError: if the tokens are damaged.
        """
        begin, end = self._edges(domain)[document : document + 2].tolist()
        tokens = self.data.domains[domain].whole.tokens
        return tokens[begin + first : end if stop is None else begin + stop]

    def text(self, domain: int, document: int, first: int = 0, stop: int | None = None) -> str:
        """Decode a document, or a range of its tokens, without end-of-document tokens.

        Raises:
            UserError: if the tokens are damaged, or the tokenizer is missing.
        """
        tokens = self.tokens(domain, document, first, stop)
        return self.tokenizer.decode(tokens[tokens != self.data.tokenizer.eod_id].tolist())

    def rows(self, first: int, last: int, only: Documents | None = None) -> Iterator[pd.DataFrame]:
        """List the tokens that the steps ``first`` to ``last`` read, from 1 and both included.

        The rows of a long run do not fit in memory, so each table has the rows of some samples.

        Args:
            first: first step.
            last: last step.
            only: domain -> sorted documents to list; None lists all.

        Yields:
            A row for each range of a document's tokens in a sample: step; sample, its number in the
            run, from 0; the data-parallel ``rank`` that read it, the ``micro_batch`` of that rank,
            and the ``row`` in the micro-batch (missing if the run does not record its layout);
            domain; document, its number in ``file``; ``document_tokens``, its length; and its
            tokens from ``first_token`` to ``stop_token``, exclusive. A sample of s tokens has s + 1
            tokens here: the last one is only predicted.
        """
        for block in self._blocks(first, last, only):
            parts = [np.empty((6, 0), np.int64)]
            for domain, ranges in block:
                edges = self._edges(domain)
                index, part = split_at_edges(edges, ranges[:, 1], ranges[:, 2])
                document, start, stop = part.document, part.start, part.start + part.length
                listed = slice(None) if only is None else np.isin(document, only[domain])
                sizes, numbers = edges[document + 1] - edges[document], np.full(len(part), domain)
                columns = ranges[index, 0], numbers, document, start, stop, sizes
                parts.append(np.stack(columns)[:, listed])
            found = np.concatenate(parts, axis=1)
            samples, domains, *others = found[:, np.argsort(found[0], kind="stable")]
            names = "document", "first_token", "stop_token", "document_tokens"
            yield pd.DataFrame(
                {
                    **self._places(samples),
                    "domain": _named(domains, self.data.names),
                    **dict(zip(names, others, strict=True)),
                    "file": _named(domains, self._prefixes),
                }
            )

    def counts(self, first: int, last: int, only: Documents | None = None) -> pd.DataFrame:
        """Count how often the steps ``first`` to ``last`` read each document.

        Args:
            first: first step.
            last: last step.
            only: domain -> documents to list, even if they were not read; None lists all documents
                that were read.

        Returns:
            A row per document, by domain and document: ``samples`` that hold tokens of the
            document, ``tokens`` of it that were predicted, ``epochs``, the predicted tokens divided
            by ``document_tokens``; and ``file``.
        """
        counts: dict[int, NDArray[np.int64]] = {}  # [3, num_documents] samples, tokens, last sample
        for block in self._blocks(first, last, only):
            for domain, ranges in block:
                edges = self._edges(domain)
                if domain not in counts:
                    counts[domain] = np.zeros((3, len(edges) - 1), np.int64)
                    counts[domain][2] = -1
                _count(edges, ranges, counts[domain])
        found = only
        if found is None:
            found = {domain: np.flatnonzero(count[1]) for domain, count in sorted(counts.items())}
        parts = [np.empty((5, 0), np.int64)]
        for domain, documents in found.items():
            sizes = np.diff(self._edges(domain))
            count = counts.get(domain, np.zeros((2, len(sizes)), np.int64))[:2, documents]
            parts.append(
                np.stack([np.full(len(documents), domain), documents, *count, sizes[documents]])
            )
        domains, documents, samples, tokens, sizes = np.concatenate(parts, axis=1)
        return pd.DataFrame(
            {
                "domain": _named(domains, self.data.names),
                "document": documents,
                "samples": samples,
                "tokens": tokens,
                "epochs": tokens / sizes,
                "document_tokens": sizes,
                "file": _named(domains, self._prefixes),
            }
        )

    def find(self, text: str) -> dict[int, NDArray[np.int64]]:
        """Find the training documents whose decoded text contains ``text``, by domain.

        Domains without samples are not searched.

        Raises:
            UserError: if the tokens are damaged, or the tokenizer is missing.
        """
        sampled = np.flatnonzero(self.samples.counts(self.num_samples)).tolist()
        searched = {domain: self._training_documents(domain) for domain in sampled}
        found: dict[int, NDArray[np.int64]] = {}
        with progress_bar(
            sum(map(len, searched.values())), "document", "searching", delay=1
        ) as bar:
            for domain, documents in searched.items():
                matches = []
                for document in documents:
                    if text in self.text(domain, document):
                        matches.append(document)
                    bar.update()
                if matches:
                    found[domain] = np.array(matches, np.int64)
        return found

    def _training_documents(self, domain: int) -> range:
        """The documents that hold the sequences of the training split."""
        data = self.data.domains[domain]
        ends = data.whole.starts[[data.first, data.stop - 1]]
        first, last = np.searchsorted(self._edges(domain), ends, side="right").tolist()
        return range(first - 1, last)

    def skipped(self, first: int, last: int) -> list[int]:
        """Steps that read their batch, but did not update the model."""
        lines = (line.get("skipped") or () for line in self.run.metrics())
        steps = (skipped["step"] for skips in lines for skipped in skips)
        return [step for step in steps if first <= step <= last]

    def _edges(self, domain: int) -> NDArray[np.int64]:
        """First token of each document in the domain's files, and the end."""
        return self.data.domains[domain].whole.document_edges

    def _blocks(
        self, first: int, last: int, only: Documents | None
    ) -> Iterator[Iterator[tuple[int, NDArray[np.int64]]]]:
        """Yield :meth:`BlendedTokens.token_ranges` of some samples at a time."""
        size, block = self.options.global_batch_size, _BLOCK_TOKENS // self.options.seq_length
        begin, end = (first - 1) * size, last * size
        with progress_bar(end - begin, "sample", "tracing", delay=1) as bar:
            for start in range(begin, end, max(block, 1)):
                samples = np.arange(start, min(start + max(block, 1), end))
                listed = self.samples.token_ranges(samples)
                yield (found for found in listed if only is None or found[0] in only)
                bar.update(len(samples))

    def _places(self, samples: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Step, rank, micro-batch and row of ``samples`` [n], each [n]."""
        steps, positions = np.divmod(samples, self.options.global_batch_size)
        places = np.zeros((3, len(samples)), np.int64)
        for layout in self.run.batch_layouts:
            later = steps >= layout.first_step
            sizes = layout.micro_batch_size, layout.data_parallel_size
            places[:, later] = place_in_step(positions[later], *sizes)
        names = "step", "rank", "micro_batch", "row", "sample"
        return dict(zip(names, (steps + 1, *places, samples), strict=True))


@njit(cache=True, nogil=True)
def _count(edges: NDArray[np.int64], ranges: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Add samples and predicted tokens of each document.

    Args:
        edges: [num_documents + 1] first token of each document, and the end.
        ranges: [r, 3] sample, first token and number of tokens of each range; the ranges of a
            sample follow each other.
        counts: [3, num_documents] number of samples and of tokens, and the last sample that held
            the document, updated: a sample at the end of an epoch may hold a document twice.
    """
    sample = np.int64(-1)
    for number in range(len(ranges)):
        start, stop = ranges[number, 1], ranges[number, 1] + ranges[number, 2]
        if ranges[number, 0] != sample:  # the first token of a sample is not predicted
            start, sample = start + 1, ranges[number, 0]
        document = np.searchsorted(edges, start, side="right") - 1
        while start < stop:
            end = min(edges[document + 1], stop)
            if end > start:
                counts[1, document] += end - start
                counts[0, document] += counts[2, document] != sample
                counts[2, document] = sample
            start = end
            document += 1


def _named(numbers: NDArray[np.int64], names: list[str]) -> Any:
    """Column of the names of domains or files, stored once each; two domains may share a file."""
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    code_of = np.array([codes[name] for name in names], np.int64)
    return pd.Categorical.from_codes(code_of[numbers], categories=[*codes])


def _absolute(path: DataPath) -> DataPath:
    return dataclasses.replace(path, prefixes=tuple(map(absolute, path.prefixes)))


def trace_samples(options: TraceOptions) -> None:
    """Print, and write with ``--output``, which documents the steps of a run read.

    Raises:
        UserError: if the run, its data or its steps do not exist, or the output exists.
    """
    if options.output is not None:
        if not options.overwrite:
            require_new([options.output], "choose another --output or pass --overwrite")
        require_writable(options.output.parent, f"--output {options.output}")
    trace = RunTrace(
        TrainingRun.load(options.run), options.corpus, options.data_path, options.tokenizer_model
    )
    first, last = trace.steps(options.step_range)
    if options.source_lines and trace.corpus is None:
        raise UserError("--source-lines: Megatron data sets do not record their raw text")
    found = trace.find(options.find) if options.find is not None else None
    lines = [
        f"{f'steps {first} to {last}' if last > first else f'step {first}'} of {trace.run.step}: "
        f"{(last - first + 1) * trace.options.global_batch_size:,} samples of "
        f"{trace.options.seq_length} tokens in the order {trace.options.data.permutation}"
    ]
    if found is not None:
        count = sum(len(documents) for documents in found.values())
        lines.append(f"{count:,} training document(s) contain {options.find!r}")
    tables: Tables = partial(trace.rows, first, last, found)
    if options.counts:
        counts = trace.counts(first, last, found)
        if found is None:
            lines += ["", _summary(trace, counts)]
        ordered = counts.sort_values("epochs", ascending=False, kind="stable", ignore_index=True)
        tables = partial(iter, [ordered])
    elif found is not None:
        lines += _when(tables(), found)
    if skipped := trace.skipped(first, last):
        lines.append(
            f"steps {_numbers(skipped, ' ...')} read their samples, but did not update the model"
        )
    _print_and_write(options, trace, lines, tables)


def _numbers(steps: list[int], more: str) -> str:
    """List the first ``steps``; ``more`` follows if there are more."""
    listed = ", ".join(map(str, steps[:_STEPS_PRINTED]))
    return listed + (more if len(steps) > _STEPS_PRINTED else "")


def _summary(trace: RunTrace, counts: pd.DataFrame) -> str:
    """Per domain: documents and tokens that were read, and the largest number of epochs."""
    rows = {}
    for name, read in counts.groupby("domain", observed=True):
        tokens = int(read["tokens"].sum())
        rows[name] = {
            "documents read": f"{len(read):,}",
            "tokens": f"{tokens:,}",
            "epochs": f"{tokens / max(trace.data.tokens[str(name)], 1):.3f}",
            "most epochs": f"{read['epochs'].max():.3f}",
        }
    return str(pd.DataFrame.from_dict(rows, orient="index").to_string())


def _when(tables: Iterable[pd.DataFrame], found: Documents) -> list[str]:
    """One line per document that was read, with the steps that read it, in the order of reading."""
    steps: dict[tuple[str, int], list[int]] = {}
    others: set[tuple[str, int]] = set()
    for table in tables:
        read = table[["domain", "document", "step"]].drop_duplicates()
        for name, document, step in read.itertuples(index=False, name=None):
            if (name, document) not in steps and len(steps) == _ROWS_PRINTED:
                others.add((name, document))
            # The next table may continue the step.
            elif (of_document := steps.setdefault((name, document), []))[-1:] != [step]:
                of_document.append(step)
    lines = [
        f"  {name} document {document}: steps "
        + _numbers(of_document, f" and {len(of_document) - _STEPS_PRINTED} more")
        for (name, document), of_document in steps.items()
    ]
    if others:
        lines.append(f"  ... {len(others):,} more documents were read")
    if unread := sum(map(len, found.values())) - len(steps) - len(others):
        lines.append(f"  not read in these steps: {unread:,} document(s)")
    return lines


def _print_and_write(
    options: TraceOptions, trace: RunTrace, lines: list[str], tables: Tables
) -> None:
    """Print ``lines`` and the first rows of the tables, and write all rows with ``--output``."""
    output = options.output
    if output is None:
        tables = partial(_first_rows, tables, _ROWS_PRINTED + 1)
    sources = _sources(trace, tables()) if options.source_lines else None
    shown: list[pd.DataFrame] = []
    count = 0
    with (
        replacing(output) if output else contextlib.nullcontext(Path(os.devnull)) as path,
        path.open("w", encoding="utf-8", newline="") as stream,
    ):
        for table in tables():
            if sources is not None:
                keys = zip(table["domain"], table["document"], strict=True)
                table = table.assign(source=[sources.get(key) for key in keys])
            if options.text:
                table = _with_text(trace, table)
            if count < _ROWS_PRINTED and len(table):
                shown.append(table.head(_ROWS_PRINTED - count))
            count += len(table)
            if output and output.suffix == ".csv":
                table.to_csv(stream, index=False, header=stream.tell() == 0)
            elif output and len(table):
                table.to_json(stream, orient="records", lines=True, force_ascii=False)
    print("\n".join(lines))
    if shown:
        print(f"\n{_printed(pd.concat(shown, ignore_index=True))}")
    if output is None and count > _ROWS_PRINTED:
        print("... more lines; --output FILE.jsonl writes all of them")
    elif count > _ROWS_PRINTED:
        print(f"... {count - _ROWS_PRINTED:,} more lines")
    if output is not None:
        print(f"written to {output}")


def _first_rows(tables: Tables, count: int) -> Iterator[pd.DataFrame]:
    """Yield the first ``count`` rows."""
    for table in tables():
        yield table.head(count)
        count -= len(table)
        if count <= 0:
            return


def _with_text(trace: RunTrace, table: pd.DataFrame) -> pd.DataFrame:
    """Add the text of each line's range of tokens, or else of the whole document."""
    columns = ["domain", "document"]
    columns += ["first_token", "stop_token"] if "first_token" in table else []
    rows = table[columns].itertuples(index=False, name=None)
    return table.assign(text=[trace.text(trace.numbers[name], *place) for name, *place in rows])


def _sources(trace: RunTrace, tables: Iterable[pd.DataFrame]) -> dict[tuple[str, int], str]:
    """Find the file and line of every document of ``tables``, if its text is found."""
    assert trace.corpus is not None
    digests: dict[tuple[str, int], bytes] = {}
    wanted: dict[str, set[bytes]] = {}
    for table in tables:
        documents = table[["domain", "document"]].drop_duplicates()
        for name, document in documents.itertuples(index=False, name=None):
            if (name, document) not in digests:
                digest = text_digest(trace.text(trace.numbers[name], document).encode())
                digests[name, document] = digest
                wanted.setdefault(name, set()).add(digest)
    lines = source_lines(trace.corpus, wanted)
    found = {key: (key[0], digest) for key, digest in digests.items()}
    return {key: lines[place] for key, place in found.items() if place in lines}


def _printed(table: pd.DataFrame) -> str:
    """Format a table for the terminal; texts are shortened."""
    table = table.drop(columns="file").astype(object)
    if "text" in table:
        texts = (" ".join(text.split()) for text in table["text"])
        table["text"] = [
            text if len(text) <= _TEXT_PRINTED else f"{text[:_TEXT_PRINTED]}..." for text in texts
        ]
    formats = {"epochs": "{:.3f}".format}
    return str(table.where(table.notna(), "?").to_string(index=False, formatters=formats))
