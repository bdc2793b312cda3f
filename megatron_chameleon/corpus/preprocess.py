"""Turn text into a corpus: plan the shards, make them, join them.

The plan contains everything that a shard's contents depend on. Shards are made in any order, by any
number of processes on any number of machines, and survive the processes; joining copies tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import SPLITS, Corpus, Cost, Domain, Stopwatch, provenance
from megatron_chameleon.artifacts.files import sha256_of_json, writing
from megatron_chameleon.artifacts.record import write_record
from megatron_chameleon.corpus.gigatoken import with_encoder, with_gigatoken
from megatron_chameleon.corpus.join import Joined, join_shards
from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.plan import Plan, make_plan
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.records import MalformedLines, describe_unused
from megatron_chameleon.corpus.shards import Shard, make_shard
from megatron_chameleon.corpus.sources import Source, find_sources
from megatron_chameleon.corpus.staging import SOURCES_NAME, CorpusFolder, corpus_folder
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.corpus.workers import work_in_processes
from megatron_chameleon.errors import UserError
from megatron_chameleon.progress import progress_bar

# Less than this is read before another process has started.
_BYTES_WORTH_A_PROCESS = 32_000_000
_SHARES_SHOWN = 10


def preprocess_data(options: PreprocessOptions) -> None:
    """Write the corpus for ``options``, or some of its shards, and print a summary.

    Raises:
        UserError: for input that cannot be read or makes no corpus; finished shards are kept,
            unless there is only one.
    """
    stopwatch = Stopwatch()
    tokenizer = _load_tokenizer(options)
    sources = find_sources(options.source, options.domains)
    plan = make_plan(options, tokenizer, sources)
    all_shards = range(len(plan.shards))
    share = options.shard_share
    with corpus_folder(options.output, options.overwrite, shared=share is not None) as folder:
        begun = folder.agree(plan)
        plan = dataclasses.replace(plan, root=begun.root)
        run = _Run(options, plan, begun.hash, tokenizer, folder)
        with _finished_shards_kept(run):
            found = sorted(folder.finished())
            run.check_sources(found, begun)
            run.make_shards(all_shards if share is None else all_shards[share[0] - 1 :: share[1]])
            if share is not None:
                print(_summary_of_share(share, all_shards, folder.finished()))
                return
            joined = run.join(found, stopwatch)
            remote = folder.remote_staging()
    corpus = Corpus.load(options.output)
    if remote:
        more = f" and {len(remote) - 1} more" if len(remote) > 1 else ""
        print(
            f"{folder.partial} still holds unfinished work of other machines ({remote[0]}{more}): "
            f"when none of them is running, remove it by rm -r {shlex.quote(str(folder.partial))}"
        )
    print(_summary(corpus, joined.malformed))
    reused = f"; {len(found)} of {len(plan.shards)} shards were finished before" if found else ""
    print(
        f"wrote {corpus.root} in {corpus.cost.wall_seconds:.0f} s{reused}\n"
        f"next: torchrun --nproc-per-node 1 tools/pretrain_gpt.py --corpus {corpus.root} "
        "--run-dir RUN --model-size SIZE --mixture uniform"
    )


def _load_tokenizer(options: PreprocessOptions) -> Tokenizer:
    pattern = options.encoding.tiktoken_pattern
    return load_tokenizer(options.tokenizer_model, options.eod_token, pattern)


@contextlib.contextmanager
def _finished_shards_kept(run: _Run) -> Iterator[None]:
    """On failure, report the finished shards; an only shard is removed, to start from scratch."""
    try:
        yield
    except BaseException:
        total, finished = len(run.plan.shards), len(run.folder.finished())
        if total == 1 and run.options.shard is None and not run.folder.is_publishing:
            run.folder.remove_work()
        elif finished:
            print(
                f"{finished} of {total} shards are finished and kept in {run.folder.partial}; the "
                "same command resumes from there",
                file=sys.stderr,
                flush=True,
            )
        raise


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Make shards of a plan and put them in their place; the task of a worker process."""

    options: PreprocessOptions
    plan: Plan
    plan_hash: str
    folder: CorpusFolder
    gigatoken: bool

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        """Load the tokenizer; return the function that makes the shard of a number."""
        tokenizer = _load_tokenizer(self.options)
        return self.with_tokenizer(
            with_gigatoken(tokenizer) if self.gigatoken else tokenizer, on_bytes
        )

    def with_tokenizer(
        self, tokenizer: Tokenizer, on_bytes: Callable[[int], object]
    ) -> Callable[[int], object]:
        """The same with a loaded tokenizer."""

        def make(number: int) -> None:
            folder = self.folder.staging / f"{number:06d}"
            with writing(folder):
                folder.mkdir()
            make_shard(self.options, self.plan, self.plan_hash, tokenizer, number, folder, on_bytes)
            self.folder.put_shard(folder, number)

        return make


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the tool, once the plan is agreed on; ``plan`` has the sources as they are now."""

    options: PreprocessOptions
    plan: Plan
    plan_hash: str
    tokenizer: Tokenizer
    folder: CorpusFolder

    def check_sources(self, finished: Sequence[int], begun: Plan) -> None:
        """Read again what ``finished`` shards read of sources that were modified since.

        Raises:
            UserError: naming the first source whose content has changed.
        """
        modified = {
            number
            for number, (source, before) in enumerate(
                zip(self.plan.sources, begun.sources, strict=True)
            )
            if source.modified_ns != before.modified_ns
        }
        if not modified:
            return
        total = sum(map(self.plan.shard_bytes, finished))
        with progress_bar(total, "B", "reading again") as bar:
            reader = DocumentReader(
                self.options.source, self.plan.sources, self.options.domains, bar.update
            )
            for number in finished:
                hashes = self._load(number).hashes
                for piece, before in zip(self.plan.shards[number], hashes, strict=True):
                    if piece.source not in modified:
                        continue
                    for _ in reader.read(piece):
                        pass
                    if reader.hashes[piece] != before:
                        raise UserError(
                            f"{self.plan.sources[piece.source].name} has changed since it was read "
                            f"for {begun.root}; restore it, or remove {begun.root} to start from "
                            "scratch"
                        )

    def make_shards(self, wanted: Sequence[int]) -> None:
        """Make those of the ``wanted`` shards that are missing."""
        finished = self.folder.finished()
        missing = [number for number in wanted if number not in finished]
        if not missing:
            return
        total = sum(map(self.plan.shard_bytes, missing))
        tokenizer = with_encoder(
            self.tokenizer, self.options.encoding.encoder, self._sample(missing)
        )
        gigatoken = tokenizer.fast_encoder is not None
        work = ShardWork(self.options, self.plan, self.plan_hash, self.folder, gigatoken)
        with progress_bar(total, "B", "tokenizing") as bar:
            num_workers = self._num_workers(missing)
            if num_workers > 1:
                del tokenizer  # the workers have their own and need its memory
                work_in_processes(work, missing, num_workers, bar.update)
                return
            make = work.with_tokenizer(tokenizer, bar.update)
            for number in missing:
                make(number)

    def join(self, found: Sequence[int], stopwatch: Stopwatch) -> Joined:
        """Make a corpus of all shards, of which ``found`` were finished before this run."""
        shards = [self._load(number) for number in range(len(self.plan.shards))]
        joining = Stopwatch()
        made = self.folder.staging / "corpus"
        with writing(made):
            made.mkdir()
        first_domains = [source.domain for source in self.plan.sources if source.domain is not None]
        drop = self.options.drop_duplicates
        with progress_bar(sum(shard.token_bytes for shard in shards), "B", "joining") as bar:
            joined = join_shards(shards, first_domains, made, drop, bar.update)
        joined.malformed.check(self.options.source.max_malformed_share)
        if joined.malformed.count:
            warnings.warn(f"{joined.malformed.describe()}; they are skipped", stacklevel=2)
        if self.options.domains.domain_key is not None:  # otherwise reported with the sources
            renamed = {name for shard in shards for name in shard.renamed}
            if unused := describe_unused(self.options.domains, renamed):
                warnings.warn(unused, stacklevel=2)
        check_domains(joined.domains, self.plan.sources, self.options.min_tokens_per_split)
        self.tokenizer.save(made)
        cost = Cost(
            device_seconds=sum(shard.seconds for shard in shards) + joining.seconds(),
            wall_seconds=stopwatch.seconds() + sum(shards[number].seconds for number in found),
        )
        sources_hash = _write_sources(made / SOURCES_NAME, self.plan, shards)
        # The corpus does not depend on which process or machine did which part of the work.
        options = dataclasses.replace(self.options, workers=None, shard=None)
        inputs = {"tokenizer": self.tokenizer.sha256, "sources": sources_hash}
        Corpus(
            root=made,
            tokenizer=self.tokenizer.identity,
            dtype=self.tokenizer.token_type,
            domains=joined.domains,
            provenance=provenance(options, inputs),
            cost=cost,
            not_written=joined.not_written,
        ).save()
        self.folder.publish(made)
        return joined

    def _sample(self, shards: Sequence[int]) -> Iterator[str]:
        """The texts of ``shards``."""
        reader = DocumentReader(self.options.source, self.plan.sources, self.options.domains)
        for number in shards:
            for piece in self.plan.shards[number]:
                yield from (document.text for document in reader.read(piece))

    def _load(self, number: int) -> Shard:
        shard = Shard.load(self.folder.shard_folder(number))
        if shard.plan != self.plan_hash:
            raise UserError(
                f"{shard.root} belongs to another plan than {self.folder.partial / Plan.FILE_NAME}"
                f"; remove {shard.root} and run the same command again"
            )
        shard.check_files()
        return shard

    def _num_workers(self, missing: Sequence[int]) -> int:
        if self.options.workers is not None:
            return min(self.options.workers, len(missing))
        pieces = [piece for number in missing for piece in self.plan.shards[number]]
        unknown = any(self.plan.sources[piece.source].kind == "dataset" for piece in pieces)
        worth = unknown or sum(piece.bytes for piece in pieces) >= _BYTES_WORTH_A_PROCESS
        # Each reads and encodes concurrently, which keeps more than a core busy.
        spare = max(1, len(os.sched_getaffinity(0)) - 1)
        return min(spare, len(missing)) if worth else 1


def check_domains(
    domains: Mapping[str, Domain], sources: Sequence[Source], min_tokens: int
) -> None:
    """Check that every domain has documents, and ``min_tokens`` tokens, in every split.

    Raises:
        UserError: naming the first domain and split that has too little.
    """
    if not domains:
        raise UserError(f"there is no text in {sources[0].name}; correct --input")
    for name, domain in domains.items():
        documents = sum(domain.split(split).documents for split in SPLITS)
        if documents == 0:
            names = [source.name for source in sources if source.domain in (name, None)]
            raise UserError(
                f"domain '{name}' is empty: there is no text for it in {' or '.join(names[:3])}; "
                "add some, or leave it out"
            )
        for split in SPLITS:
            part = domain.split(split)
            if part.documents == 0:
                raise UserError(
                    f"domain '{name}' has no document in {split}, of {documents} in all; add "
                    "documents, or change --split"
                )
            if part.tokens < min_tokens:
                raise UserError(
                    f"domain '{name}' has {part.tokens} tokens in {split}, fewer than "
                    f"--min-tokens-per-split {min_tokens}; add text, or give {split} a larger share"
                )


@dataclasses.dataclass(frozen=True)
class _SourcesRead:
    """What sources.json records: name, bytes and pieces of each source."""

    sources: list[dict[str, Any]]


def _write_sources(path: Path, plan: Plan, shards: Sequence[Shard]) -> str:
    """Record every source and the hash of each of its pieces; return one hash of all contents."""
    pieces: list[list[dict[str, Any]]] = [[] for _ in plan.sources]
    for planned, shard in zip(plan.shards, shards, strict=True):
        for piece, sha256 in zip(planned, shard.hashes, strict=True):
            read = {"start": piece.start, "stop": piece.stop, "sha256": sha256}
            pieces[piece.source].append(read)
    sources = [
        {"name": source.name, "bytes": source.bytes, "pieces": read}
        for source, read in zip(plan.sources, pieces, strict=True)
    ]
    write_record(path, _SourcesRead(sources), kind="sources of a corpus", version=1)
    return sha256_of_json([piece["sha256"] for read in pieces for piece in read])


def _summary_of_share(share: tuple[int, int], shards: range, finished: Collection[int]) -> str:
    number, count = share
    missing = set(shards) - set(finished)
    if not missing:
        return (
            f"--shard {number}/{count} is done, and so are all {len(shards)} shards\n"
            "next: the same command without --shard joins them"
        )
    others = [f"--shard {i}/{count}" for i in sorted({shard % count + 1 for shard in missing})]
    more = f" and {len(others) - _SHARES_SHOWN} more" if len(others) > _SHARES_SHOWN else ""
    return (
        f"--shard {number}/{count} is done; {len(missing)} of all {len(shards)} shards are "
        f"missing\nnext: the same command with {', '.join(others[:_SHARES_SHOWN])}{more}, and "
        "without --shard in the end"
    )


def _summary(corpus: Corpus, malformed: MalformedLines) -> str:
    """A table with a row per domain and the total."""
    has_held_out = any(each.held_out for each in corpus.not_written.values())

    def row(head: str, names: Sequence[str], malformed_lines: int) -> tuple[str, ...]:
        parts = [[corpus.domains[name].split(split) for name in names] for split in SPLITS]
        tokens = [sum(part.tokens for part in of_split) for of_split in parts]
        documents = sum(part.documents for of_split in parts for part in of_split)
        text_bytes = sum(part.text_bytes for of_split in parts for part in of_split)
        not_written = [corpus.not_written[name] for name in names]
        counts = [
            sum(each.duplicates for each in not_written),
            *([sum(each.held_out for each in not_written)] if has_held_out else []),
            sum(each.empty for each in not_written),
            malformed_lines,
        ]
        figures = [f"{count:,}" for count in (documents, *tokens)]
        return head, *figures, f"{text_bytes / sum(tokens):.2f}", *(f"{n:,}" for n in counts)

    header = (
        "domain",
        "documents",
        *(f"{split} tokens" for split in SPLITS),
        "bytes/token",
        "duplicates",
        *(["held out"] if has_held_out else []),
        "empty",
        "malformed",
    )
    rows = [header, *(row(n, [n], corpus.not_written[n].malformed) for n in corpus.names)]
    rows.append(row("total", corpus.names, malformed.count))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [cells[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        )
        for cells in rows
    ]
    return "\n".join(
        [lines[0], "-" * len(lines[0]), *lines[1:], malformed.describe_unwanted()]
    ).rstrip()
