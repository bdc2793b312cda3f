"""Turn text into a corpus: plan the shards, write them, join them.

The plan contains everything that determines a shard. Shards can be written in any order by any
number of processes and machines, and survive a killed run; joining copies their tokens.
``assign_splits`` of shards.py assigns documents to splits, and join.py resolves conflicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import SPLITS, Corpus, Cost, Domain, Stopwatch, provenance
from megatron_chameleon.artifacts.corpus import table_label
from megatron_chameleon.artifacts.files import sha256_of_json, writing
from megatron_chameleon.artifacts.record import FileRecord
from megatron_chameleon.corpus.gigatoken import with_encoder, with_gigatoken
from megatron_chameleon.corpus.join import Joined, join_shards
from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.readers import DocumentReader, MalformedLines
from megatron_chameleon.corpus.repeats import find_repeats, format_repeats, require_minhash
from megatron_chameleon.corpus.shards import Shard, is_limited, make_shard
from megatron_chameleon.corpus.sources import Chunk, Source, find_sources
from megatron_chameleon.corpus.staging import (
    SOURCES_NAME,
    CorpusFolder,
    ShardPlan,
    corpus_folder,
    plan_shards,
)
from megatron_chameleon.corpus.subset import (
    next_shards,
    token_budgets,
    warn_left_out,
    warn_short_domains,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.study.executor import Executor, Job
from megatron_chameleon.study.ray import map_on_ray
from megatron_chameleon.study.workers import portable, workers

OnBytes = Callable[[int], object]


def preprocess_data(options: PreprocessOptions) -> None:
    """Write the corpus for ``options``, or some of its shards, and print a summary.

    Raises:
        UserError: for unreadable or insufficient input; finished shards are kept, unless there is
            only one.
    """
    stopwatch = Stopwatch()
    if options.find_repeats == "near":
        require_minhash()
    tokenizer = _load_tokenizer(options)
    sources = find_sources(options.source, options.domains)
    budgets = token_budgets(options, sources)
    plan = plan_shards(options, tokenizer, sources, budgets)
    total = len(plan.shards)
    with corpus_folder(
        options.output, options.overwrite, shared=options.shard is not None
    ) as folder:
        existing = folder.agree(plan)
        run = _Run(options, plan, existing.hash, folder)
        try:
            found = sorted(folder.finished())
            run.check_sources(found, existing)
            if options.shard_share is not None:
                first, step = options.shard_share
                run.make_shards(range(total)[first - 1 :: step], tokenizer)
                print(
                    f"--shard {options.shard} is done: {len(folder.finished())} of {total} shards "
                    "are finished\nnext: join them with the same command without --shard"
                )
                return
            if budgets is None:
                run.make_shards(range(total), tokenizer)
                shards = {number: run.load(number) for number in range(total)}
            else:
                shards = run.make_subset(tokenizer, budgets)
            joined = run.join(shards, found, tokenizer, stopwatch)
        except BaseException:
            finished = len(folder.finished())
            if total == 1 and options.shard is None and not folder.is_publishing:
                folder.remove_work()  # start from scratch
            elif finished:
                print(
                    f"{finished} of {total} shards are finished and kept in {folder.partial}; the "
                    "same command resumes from there",
                    file=sys.stderr,
                    flush=True,
                )
            raise
    corpus = Corpus.load(options.output)
    print(_summary(corpus, joined.malformed))
    if options.find_repeats == "near":
        print(format_repeats(corpus))
    num_reused = len(set(found) - run.removed.keys())
    reused = f"; {num_reused} of {total} shards were finished before" if num_reused else ""
    print(
        f"wrote {corpus.root} in {corpus.cost.wall_seconds:.0f} s{reused}\n"
        f"next: megatron-chameleon pretrain_gpt --corpus {shlex.quote(str(corpus.root))} --run-dir "
        f"RUN --model MODEL --mixture {shlex.quote(options.mixture or 'uniform')}"
    )


def _load_tokenizer(options: PreprocessOptions) -> Tokenizer:
    pattern = options.encoding.tiktoken_pattern
    return load_tokenizer(options.tokenizer_model, options.eod_token, pattern)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the tool, once all processes have agreed on a plan; worker processes get a copy.

    Attributes:
        options: options of the tool.
        plan: plan with the current states of the sources.
        plan_hash: hash of the plan that all processes have agreed on.
        folder: corpus folder.
        gigatoken: whether workers encode with gigatoken; None until it is known.
        budgets: shard -> the budgets with which it is made; empty if everything is read.
        removed: shard -> wall times, in seconds, of the finished shards that this run has removed
            to make them again.
    """

    options: PreprocessOptions
    plan: ShardPlan
    plan_hash: str
    folder: CorpusFolder
    gigatoken: bool | None = None
    budgets: Mapping[int, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    removed: dict[int, list[float]] = dataclasses.field(default_factory=dict)

    def make_shard(
        self, tokenizer: Tokenizer, number: int, on_bytes: OnBytes | None = None
    ) -> None:
        """Write shard ``number`` and move it to the folder of finished shards."""
        # The name is unique, since Ray may start a shard again while a lost machine still writes.
        folder = self.folder.staging / f"{number:06d}-{secrets.token_hex(4)}"
        with writing(folder):
            folder.mkdir()
        chunks, shares = self.plan.shards[number], self.options.split_shares
        reader, budgets = self._reader(on_bytes), self.budgets.get(number)
        make_shard(reader, chunks, shares, tokenizer, self.plan_hash, folder, budgets)
        self.folder.put_shard(folder, number)

    def check_sources(self, finished: Sequence[int], existing: ShardPlan) -> None:
        """Check that sources with another time or ETag match the hashes of finished shards.

        A shard that did not read such a source to its end has no hash of it, and is removed.

        Raises:
            UserError: naming the first source whose content has changed.
        """
        pairs = enumerate(zip(self.plan.sources, existing.sources, strict=True))
        changed = {number for number, (now, then) in pairs if now.state != then.state}
        hashes: dict[Chunk, str | None] = {}
        for number in finished:
            chunks = self.plan.shards[number]
            if any(chunk.source in changed for chunk in chunks):
                shard = self.load(number)
                found = zip(chunks, shard.hashes, strict=True)
                of_changed = {c: sha256 for c, sha256 in found if c.source in changed}
                if all(of_changed.values()):
                    hashes |= of_changed
                else:
                    self._remove(shard, number)
        for chunk, sha256 in hashes.items():
            reader = self._reader()
            for _ in reader.read(chunk):
                pass
            if reader.hashes[chunk] != sha256:
                raise UserError(
                    f"{self.plan.sources[chunk.source].name} has changed since it was read for "
                    f"{existing.root}; restore it, or remove {existing.root} to start from scratch"
                )

    def make_shards(self, wanted: Sequence[int], tokenizer: Tokenizer) -> bool | None:
        """Write the ``wanted`` shards that are not finished yet; return ``gigatoken``."""
        finished = self.folder.finished()
        missing = [number for number in wanted if number not in finished]
        if not missing:
            return self.gigatoken
        if self.gigatoken is None:
            chunks = [c for number in missing for c in self.plan.shards[number] if self._is_read(c)]
            reader = self._reader()
            sample = (document.text for chunk in chunks for document in reader.read(chunk))
            tokenizer = with_encoder(tokenizer, self.options.encoding.encoder, sample)
        elif self.gigatoken:
            tokenizer = with_gigatoken(tokenizer)
        run = dataclasses.replace(self, gigatoken=tokenizer.fast_encoder is not None)
        # By default there is one worker fewer than cores, since each worker reads and encodes
        # concurrently, which keeps more than one core busy.
        num_workers = self.options.workers or max(1, len(os.sched_getaffinity(0)) - 1)
        num_workers = min(num_workers, len(missing))
        total = sum(map(self.plan.shard_bytes, missing))
        with progress_bar(total, "B", "tokenizing") as bar:
            if self.options.ray:
                make_on_ray(run, missing, bar.update)
            elif num_workers > 1:
                # Free the memory of the tokenizer, since each worker loads its own copy.
                del tokenizer
                make_in_processes(run, missing, num_workers, bar.update)
            else:
                for number in missing:
                    self.make_shard(tokenizer, number, bar.update)
        return run.gigatoken

    def make_subset(self, tokenizer: Tokenizer, budgets: Mapping[str, int]) -> dict[int, Shard]:
        """Write the shards that fill the ``budgets``; return them by number, in order."""
        run = self
        shards: dict[int, Shard] = {}
        scratch, drop = self.folder.staging / "left-out", self.options.drop_duplicates
        shares = self._subset_shares()
        while True:
            shards |= {n: self.load(n) for n in self.folder.finished() - shards.keys()}
            used, missing = next_shards(self.plan, budgets, shards, scratch, drop, shares)
            if not missing:
                return {number: shards[number] for number in used}
            for number in missing.keys() & shards.keys():
                self._remove(shards.pop(number), number)
            run = dataclasses.replace(run, budgets=missing)
            gigatoken = run.make_shards(sorted(missing), tokenizer)
            run = dataclasses.replace(run, gigatoken=gigatoken)

    def _remove(self, shard: Shard, number: int) -> None:
        self.folder.remove_shard(number)
        self.removed.setdefault(number, []).append(shard.seconds)

    def join(
        self,
        by_number: Mapping[int, Shard],
        found: Sequence[int],
        tokenizer: Tokenizer,
        stopwatch: Stopwatch,
    ) -> Joined:
        """Join shards, in order; those with numbers in ``found`` were finished before this run."""
        shards = list(by_number.values())
        joining = Stopwatch()
        made = self.folder.staging / "corpus"
        with writing(made):
            made.mkdir()
        drop, budgets = self.options.drop_duplicates, self.plan.budgets
        first_domains = [
            source.domain
            for source in self.plan.sources
            if source.domain is not None
            and (budgets is None or source.split == "held_out" or source.domain in budgets)
        ]
        with progress_bar(sum(shard.token_bytes for shard in shards), "B", "joining") as bar:
            joined = join_shards(
                shards, first_domains, made, drop, bar.update, budgets, self._subset_shares()
            )
        joined.malformed.check(self.options.source.max_malformed_share)
        # Without a domain key, find_sources has already reported the renames.
        if self.options.domains.domain_key is not None:
            self.options.domains.report_renames(joined.malformed.names, "documents")
        sources = self.plan.sources
        never_trained = {source.domain for source in sources if source.split == "held_out"}
        held_out = [name for name in joined.domains if name in never_trained]
        if budgets is not None:
            warn_left_out(shards, self.options.mixture)
            warn_short_domains(joined.domains, budgets)
        check_domains(joined.domains, held_out, sources, self.options.min_tokens_per_split)
        tokenizer.save(made)
        seconds = {n: [*self.removed.get(n, []), s.seconds] for n, s in by_number.items()}
        cost = Cost(
            device_seconds=sum(map(sum, seconds.values())) + joining.seconds(),
            # A shard that was found and made again was made by the earlier run the first time.
            wall_seconds=stopwatch.seconds() + sum(seconds[n][0] for n in found if n in seconds),
        )
        hashes: dict[Chunk, str | None] = {}
        for place, (number, shard) in enumerate(by_number.items()):
            for chunk, sha256 in zip(self.plan.shards[number], shard.hashes, strict=True):
                source = sources[chunk.source]
                if budgets is not None and is_limited(source):
                    names = budgets.keys() & joined.unfilled[place]
                    if source.domain not in (None, *names):
                        continue
                    # How far the text after the last budget is read depends on interruptions.
                    if source.domain is None and not names & joined.unfilled[place + 1]:
                        sha256 = None
                hashes[chunk] = sha256
        sources_hash = _write_sources(made / SOURCES_NAME, sources, hashes)
        # These options are not recorded, since the corpus does not depend on them.
        options = dataclasses.replace(self.options, workers=None, shard=None, ray=False)
        inputs = {"tokenizer": tokenizer.sha256, "sources": sources_hash}
        corpus = Corpus(
            root=made,
            tokenizer=tokenizer.identity,
            dtype=tokenizer.token_type,
            domains={n: d for n, d in joined.domains.items() if n not in held_out},
            provenance=provenance(options, inputs),
            cost=cost,
            not_written=joined.not_written,
            max_tokens=budgets or {},
            repeats=joined.repeats,
            held_out={n: d for n, d in joined.domains.items() if n in held_out},
        )
        if self.options.find_repeats == "near":
            near = find_repeats(corpus, near=True, folder=self.folder.staging)
            repeats = {
                name: dataclasses.replace(
                    exact,
                    near_documents=near[name].near_documents,
                    near_tokens=near[name].near_tokens,
                )
                for name, exact in joined.repeats.items()
            }
            corpus = dataclasses.replace(corpus, repeats=repeats)
        corpus.save()
        self.folder.publish(made)
        return joined

    def _is_read(self, chunk: Chunk) -> bool:
        source, budgets = self.plan.sources[chunk.source], self.plan.budgets
        return budgets is None or not is_limited(source) or source.domain in (None, *budgets)

    def _subset_shares(self) -> tuple[float, float, float] | None:
        """The argument ``subset_shares`` of :func:`join_shards`."""
        is_by_hash = any(source.split is None for source in self.plan.sources)
        return self.options.split_shares if self.plan.budgets and is_by_hash else None

    def _reader(self, on_bytes: OnBytes | None = None) -> DocumentReader:
        source, domains = self.options.source, self.options.domains
        return DocumentReader(source, self.plan.sources, domains, on_bytes)

    def load(self, number: int) -> Shard:
        """Read the finished shard ``number``.

        Raises:
            UserError: if it belongs to another plan or is damaged.
        """
        shard = Shard.load(self.folder.shard_folder(number))
        if shard.plan != self.plan_hash:
            plan = self.folder.partial / ShardPlan.FILE_NAME
            raise UserError(
                f"{shard.root} belongs to another plan than {plan}; remove {shard.root} and run "
                "the same command again"
            )
        shard.check_files()
        return shard


def check_domains(
    domains: Mapping[str, Domain],
    held_out: Collection[str],
    sources: Sequence[Source],
    min_tokens: int,
) -> None:
    """Check that every domain has documents, and ``min_tokens`` tokens, in every split.

    Domains in ``held_out`` have no train split.

    Raises:
        UserError: naming the first domain and split that has too little.
    """
    if len(domains) == len(held_out):
        raise UserError(f"no text in {sources[0].name}; correct --input")
    for name, domain in domains.items():
        for split in SPLITS[1:] if name in held_out else SPLITS:
            part = domain.split(split)
            if part.documents == 0 or part.tokens < min_tokens:
                names = [source.name for source in sources if source.domain in (name, None)]
                raise UserError(
                    f"domain '{name}' has {part.documents} documents in {split} with {part.tokens} "
                    f"tokens, fewer than --min-tokens-per-split {min_tokens} (from "
                    f"{' or '.join(names[:3])}); add text, or change --split or --max-tokens"
                )


@dataclasses.dataclass(frozen=True)
class _SourceHashes(FileRecord):
    """Contents of sources.json: name, bytes and chunks of each source."""

    KIND = "sources of a corpus"
    MADE_BY = "megatron-chameleon preprocess_data writes it"

    sources: list[dict[str, Any]]


def _write_sources(
    path: Path, all_sources: Sequence[Source], hashes: Mapping[Chunk, str | None]
) -> str:
    """Record each source with the ``hashes`` of its chunks, sorted by source.

    Returns:
        One hash of all contents.
    """
    sources = []
    for number, pairs in itertools.groupby(hashes.items(), key=lambda pair: pair[0].source):
        source = all_sources[number]
        read = [{"start": c.start, "stop": c.stop, "sha256": sha256} for c, sha256 in pairs]
        sources.append({"name": source.name, "bytes": source.bytes, "pieces": read})
    _SourceHashes(sources).save(path)
    # Text that was not read to its end has no hash.
    contents = [
        sha256 or [all_sources[c.source].name, all_sources[c.source].bytes, c.start, c.stop]
        for c, sha256 in hashes.items()
    ]
    return sha256_of_json(contents)


def _summary(corpus: Corpus, malformed: MalformedLines) -> str:
    """Format a table of tokens, documents and documents left out, per domain and in total."""
    import pandas as pd

    rows = []
    for name, domain in corpus.all_domains.items():
        parts = [domain.split(split) for split in SPLITS]
        row = {
            "documents": sum(part.documents for part in parts),
            **{f"{split} tokens": part.tokens for split, part in zip(SPLITS, parts, strict=True)},
            "bytes/token": sum(part.text_bytes or 0 for part in parts),
            "duplicates": corpus.not_written[name].duplicates,
            "held out": corpus.not_written[name].held_out,
            "empty": corpus.not_written[name].empty,
            "malformed": corpus.not_written[name].malformed,
        }
        rows.append(row)
    labels = [table_label(name, corpus.held_out) for name in corpus.all_domains]
    table = pd.DataFrame(rows, labels)
    total = {**table.sum(), "malformed": malformed.count}
    table = pd.concat([table, pd.DataFrame(total, index=["total"])])
    tokens = table[[f"{split} tokens" for split in SPLITS]].sum(axis="columns")
    table["bytes/token"] = (table["bytes/token"] / tokens).map("{:.2f}".format)
    table.columns.name = "domain"
    formats = dict.fromkeys(table.columns.drop("bytes/token"), "{:,}".format)
    return table.to_string(formatters=formats, col_space={n: len(n) + 1 for n in table})


# Worker processes


def make_on_ray(run: _Run, numbers: Sequence[int], on_bytes: OnBytes) -> None:
    """Write the shards ``numbers`` as tasks of a Ray cluster, which start again if they are killed.

    Raises:
        UserError: from a task, or if Ray is unreachable or kills the same task several times.
        RuntimeError: with the traceback of a task that failed for another reason.
    """
    with contextlib.closing(map_on_ray(functools.partial(_make_in_task, run), numbers)) as made:
        for number in made:
            on_bytes(run.plan.shard_bytes(number))


def make_in_processes(
    run: _Run, numbers: Sequence[int], num_workers: int, on_bytes: OnBytes
) -> None:
    """Write the shards ``numbers`` in worker processes, which never outlive this process.

    Raises:
        UserError: from a worker, or because a worker was killed.
        RuntimeError: with the traceback of a worker that failed for another reason.
        KeyboardInterrupt: after a stop signal to a worker.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    prepare = functools.partial(_open_in_worker, run, threads)
    with workers(num_workers, prepare, "fewer --workers") as launch:
        executor = Executor([_job(run, number) for number in numbers], num_workers, launch)
        while executor.is_active:
            for event in executor.poll():
                if event.error is not None:
                    raise event.error
                if event.state == "stopped":
                    raise KeyboardInterrupt
                if event.state == "done":
                    on_bytes(run.plan.shard_bytes(int(event.job.name)))


def _job(run: _Run, number: int) -> Job:
    return Job(
        name=str(number),
        work=functools.partial(_make_in_worker, number=number),
        done=run.folder.shard_folder(number).exists,
    )


def _open_in_worker(run: _Run, threads: int) -> tuple[_Run, Tokenizer]:
    # Limit the threads of the Rust libraries, which would otherwise use all cores in each worker.
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    # The parent process has already printed these warnings.
    warnings.simplefilter("ignore")
    return run, _worker_tokenizer(run.options, bool(run.gigatoken))


@functools.cache  # a worker of Ray opens it for each of its tasks
def _worker_tokenizer(options: PreprocessOptions, gigatoken: bool) -> Tokenizer:
    tokenizer = _load_tokenizer(options)
    return with_gigatoken(tokenizer) if gigatoken else tokenizer


def _make_in_worker(opened: tuple[_Run, Tokenizer], number: int) -> bool:
    run, tokenizer = opened
    run.make_shard(tokenizer, number)
    return True


def _make_in_task(run: _Run, number: int) -> int:
    try:
        _make_in_worker(_open_in_worker(run, threads=1), number)
    except BaseException as error:
        raise portable(error) from None
    return number
