"""Text to corpus: a plan, its shards, and what they are joined to.

Everything a shard's content depends on is in the plan. Shards are made in any order, by any number
of processes on any number of machines, and kept when one of them ends; joining them copies tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Cost, Stopwatch, provenance
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.reading.domain_names import DomainNames
from megatron_chameleon.corpus.reading.readers import DocumentReader
from megatron_chameleon.corpus.reading.sources import find_sources
from megatron_chameleon.corpus.shards.domain_checks import check_domains
from megatron_chameleon.corpus.shards.folder import SOURCES_NAME, CorpusFolder, corpus_folder
from megatron_chameleon.corpus.shards.join import Joined, join_shards
from megatron_chameleon.corpus.shards.plan import Plan, make_plan
from megatron_chameleon.corpus.shards.shard import Shard
from megatron_chameleon.corpus.shards.shard_maker import ShardMaker
from megatron_chameleon.corpus.shards.share import Share, parse_share
from megatron_chameleon.corpus.shards.sources_read import write_sources
from megatron_chameleon.corpus.shards.unchanged import check_what_was_read
from megatron_chameleon.corpus.shards.workers import work_in_processes
from megatron_chameleon.corpus.split import parse_split
from megatron_chameleon.corpus.summary import closing_words, words_after_share, words_on_left_desks
from megatron_chameleon.corpus.tokenization.fast_encoder import with_encoder, with_gigatoken
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.preprocess import PreprocessOptions
from megatron_chameleon.options.source import DomainOptions
from megatron_chameleon.progress import progress_bar

# Less than this is read before another process has started.
_BYTES_WORTH_A_PROCESS = 32_000_000


def preprocess_data(options: PreprocessOptions) -> None:
    """Write the corpus that ``options`` ask for, or a share of its shards; say what was done.

    Raises:
        UserError: for input that cannot be read or makes no corpus; finished shards are kept,
            unless there is only one.
    """
    stopwatch = Stopwatch()
    share = None if options.shard is None else parse_share(options.shard)
    _check_numbers(options)
    tokenizer = _own_tokenizer(options)
    sources = find_sources(options.source, options.domains)
    plan = make_plan(options, tokenizer, sources)
    with corpus_folder(options.output, options.overwrite, shared=share is not None) as folder:
        begun = folder.agree(plan)
        plan = dataclasses.replace(plan, root=begun.root)
        run = _Run(options, plan, begun.hash, tokenizer, folder)
        with _finished_shards_kept(run, share):
            found = sorted(folder.finished())
            run.check_finished(found, begun)
            run.make_shards(share)
            if share is not None:
                missing = set(range(len(plan.shards))) - folder.finished()
                print(words_after_share(share, len(plan.shards), missing))
                return
            joined = run.join(found, stopwatch)
            left = folder.left_elsewhere()
    corpus = Corpus.load(options.output)
    if left:
        print(words_on_left_desks(folder.partial, left))
    print(closing_words(corpus, joined.malformed, len(found), len(plan.shards)))


def _own_tokenizer(options: PreprocessOptions) -> Tokenizer:
    pattern = options.encoding.tiktoken_pattern
    return load_tokenizer(options.tokenizer_model, options.eod_token, pattern)


def _check_numbers(options: PreprocessOptions) -> None:
    parse_split(options.split)
    for flag, value, least in (
        ("workers", options.workers, 1),
        ("shard-bytes", options.shard_bytes, 1),
        ("min-tokens-per-split", options.min_tokens_per_split, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"--{flag} {value}: a number from {least} on is expected")


@contextlib.contextmanager
def _finished_shards_kept(run: _Run, share: Share | None) -> Iterator[None]:
    """Where the block fails, say what is kept; of a single shard nothing, it is begun anew."""
    try:
        yield
    except BaseException:
        total, kept = len(run.plan.shards), len(run.folder.finished())
        if total == 1 and share is None:
            run.folder.remove_work()
        elif kept:
            print(
                f"{kept} of {total} shards are finished and kept in {run.folder.partial}; the same "
                "command goes on from there",
                file=sys.stderr,
                flush=True,
            )
        raise


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Making shards of a plan and putting them in their place, in this process or another one."""

    options: PreprocessOptions
    plan: Plan
    plan_hash: str
    folder: CorpusFolder
    gigatoken: bool

    def __call__(self, on_bytes: Callable[[int], object]) -> Callable[[int], object]:
        """Open the tokenizer; return what makes the shard of a number."""
        tokenizer = _own_tokenizer(self.options)
        return self.with_tokenizer(
            with_gigatoken(tokenizer) if self.gigatoken else tokenizer, on_bytes
        )

    def with_tokenizer(
        self, tokenizer: Tokenizer, on_bytes: Callable[[int], object]
    ) -> Callable[[int], object]:
        """The same with a tokenizer that is open."""
        maker = ShardMaker(self.options, self.plan, self.plan_hash, tokenizer)

        def make(number: int) -> None:
            written = self.folder.desk / f"{number:06d}"
            with writing(written):
                written.mkdir()
            maker.make(number, written, on_bytes)
            self.folder.put_shard(written, number)

        return make


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the tool, once the plan is agreed on; ``plan`` has the sources as they are."""

    options: PreprocessOptions
    plan: Plan
    plan_hash: str
    tokenizer: Tokenizer
    folder: CorpusFolder

    def check_finished(self, finished: Sequence[int], begun: Plan) -> None:
        """Refuse sources that are not what the ``finished`` shards were made of."""
        if self.plan.sources == begun.sources:
            return
        hashes = {number: self._load(number).hashes for number in finished}
        total = sum(map(self.plan.shard_bytes, finished))
        with progress_bar(total, "B", "reading again") as bar:
            check_what_was_read(self.options, self.plan, begun, hashes, bar.update)

    def make_shards(self, share: Share | None) -> None:
        """Make the shards that are missing, or those of them that are in ``share``."""
        finished = self.folder.finished()
        missing = [
            number
            for number in range(len(self.plan.shards))
            if number not in finished and (share is None or share.has(number))
        ]
        if not missing:
            return
        total = sum(map(self.plan.shard_bytes, missing))
        tokenizer = with_encoder(
            self.tokenizer, self.options.encoding.encoder, self._sample(missing)
        )
        gigatoken = tokenizer.stand_in is not None
        work = ShardWork(self.options, self.plan, self.plan_hash, self.folder, gigatoken)
        with progress_bar(total, "B", "tokenizing") as bar:
            num_workers = self._num_workers(missing)
            if num_workers > 1:
                del tokenizer  # the workers have their own; its memory is theirs
                work_in_processes(work, missing, num_workers, bar.update)
                return
            make = work.with_tokenizer(tokenizer, bar.update)
            for number in missing:
                make(number)

    def join(self, found: Sequence[int], stopwatch: Stopwatch) -> Joined:
        """Make a corpus of all shards, of which ``found`` were there before this run."""
        shards = [self._load(number) for number in range(len(self.plan.shards))]
        joining = Stopwatch()
        made = self.folder.desk / "corpus"
        with writing(made):
            made.mkdir()
        first_domains = [source.domain for source in self.plan.sources if source.domain is not None]
        drop = self.options.drop_duplicates
        with progress_bar(sum(shard.token_bytes for shard in shards), "B", "joining") as bar:
            joined = join_shards(shards, first_domains, made, drop, bar.update)
        _check_lines(joined, self.options.source.max_malformed_share)
        _warn_of_unused_renames(self.options.domains, shards)
        check_domains(joined.domains, self.plan.sources, self.options.min_tokens_per_split)
        self.tokenizer.save(made)
        cost = Cost(
            device_seconds=sum(shard.seconds for shard in shards) + joining.seconds(),
            wall_seconds=stopwatch.seconds() + sum(shards[number].seconds for number in found),
        )
        self._write_corpus(made, shards, joined, cost)
        self.folder.publish(made)
        return joined

    def _write_corpus(
        self, made: Path, shards: Sequence[Shard], joined: Joined, cost: Cost
    ) -> None:
        sources_hash = write_sources(made / SOURCES_NAME, self.plan, shards)
        # Who did which part of the work leaves no trace in what was made.
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

    def _sample(self, shards: Sequence[int]) -> Iterator[str]:
        """The first texts of ``shards``."""
        reader = DocumentReader(self.options.source, self.plan.sources, self.options.domains)
        for number in shards:
            for piece in self.plan.shards[number]:
                yield from (document.text for document in reader.read(piece))

    def _load(self, number: int) -> Shard:
        shard = Shard.load(self.folder.shard_folder(number))
        if shard.plan != self.plan_hash:
            raise UserError(
                f"{shard.root} was made by another plan than {self.folder.partial / Plan.FILE_NAME}"
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
        # Each reads and encodes at the same time, which keeps more than a core busy.
        spare = max(1, len(os.sched_getaffinity(0)) - 1)
        return min(spare, len(missing)) if worth else 1


def _warn_of_unused_renames(domains: DomainOptions, shards: Sequence[Shard]) -> None:
    if domains.domain_key is not None:  # otherwise it was known when the sources were found
        renamed = {name for shard in shards for name in shard.renamed}
        if unused := DomainNames(domains).describe_unused(renamed):
            warnings.warn(unused, stacklevel=2)


def _check_lines(joined: Joined, max_malformed_share: float) -> None:
    joined.malformed.check(max_malformed_share)
    if joined.malformed.count:
        warnings.warn(f"{joined.malformed.describe()}; they are left out", stacklevel=2)
