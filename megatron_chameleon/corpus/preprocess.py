"""Turn text into a corpus: plan the shards, write them, join them.

The plan contains everything that determines a shard. Shards can be written in any order by any
number of processes and machines, and survive a killed run; joining copies their tokens.
``splits_of`` of shards.py assigns documents to splits, and join.py resolves conflicts.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import SPLITS, Corpus, Cost, Domain, Stopwatch, provenance
from megatron_chameleon.artifacts.files import sha256_of_json, writing
from megatron_chameleon.artifacts.record import FileRecord
from megatron_chameleon.corpus.gigatoken import with_encoder, with_gigatoken
from megatron_chameleon.corpus.join import Joined, join_shards
from megatron_chameleon.corpus.options import PreprocessOptions, quoted
from megatron_chameleon.corpus.readers import DocumentReader, MalformedLines
from megatron_chameleon.corpus.shards import Shard, make_shard
from megatron_chameleon.corpus.sources import Source, find_sources
from megatron_chameleon.corpus.staging import (
    SOURCES_NAME,
    CorpusFolder,
    Plan,
    corpus_folder,
    make_plan,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError, system_error_message
from megatron_chameleon.progress import progress_bar

# Less than this is read before another process has started.
_BYTES_WORTH_A_PROCESS = 32_000_000
_SHARES_SHOWN = 10
_SECONDS_BETWEEN_REPORTS = 0.2

OnBytes = Callable[[int], object]
Work = Callable[[OnBytes], Callable[[int], object]]


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
    total = len(plan.shards)
    with corpus_folder(
        options.output, options.overwrite, shared=options.shard is not None
    ) as folder:
        existing = folder.agree(plan)
        run = _Run(options, dataclasses.replace(plan, root=existing.root), existing.hash, folder)
        try:
            found = sorted(folder.finished())
            run.check_sources(found, existing)
            if options.shard_share is not None:
                first, step = options.shard_share
                run.make_shards(range(total)[first - 1 :: step], tokenizer)
                missing = sorted({n % step + 1 for n in set(range(total)) - folder.finished()})
                others = [f"--shard {i}/{step}" for i in missing[:_SHARES_SHOWN]]
                others += ["..."] if len(missing) > _SHARES_SHOWN else []
                print(
                    f"--shard {options.shard} is done\nnext: the same command "
                    + (f"with {', '.join(others)}, then " if others else "")
                    + f"without --shard, which joins all {total} shards"
                )
                return
            run.make_shards(range(total), tokenizer)
            joined = run.join(found, tokenizer, stopwatch)
            remote = folder.remote_staging()
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
    if remote:
        more = f" and {len(remote) - 1} more" if len(remote) > 1 else ""
        print(
            f"{folder.partial} still holds unfinished work of other machines ({remote[0]}{more}): "
            f"when none of them is running, remove it by rm -r {shlex.quote(str(folder.partial))}"
        )
    print(_summary(corpus, joined.malformed))
    reused = f"; {len(found)} of {total} shards were finished before" if found else ""
    print(
        f"wrote {corpus.root} in {corpus.cost.wall_seconds:.0f} s{reused}\n"
        f"next: torchrun --nproc-per-node 1 tools/pretrain_gpt.py --corpus {corpus.root} "
        "--run-dir RUN --model-size SIZE --mixture uniform"
    )


def _load_tokenizer(options: PreprocessOptions) -> Tokenizer:
    pattern = options.encoding.tiktoken_pattern
    return load_tokenizer(options.tokenizer_model, options.eod_token, pattern)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the tool, once the plan is agreed on; worker processes get a copy.

    Attributes:
        options: of the run.
        plan: with the sources as they are now.
        plan_hash: of the plan that all processes have agreed on.
        folder: the corpus folder.
        gigatoken: whether workers encode with gigatoken.
    """

    options: PreprocessOptions
    plan: Plan
    plan_hash: str
    folder: CorpusFolder
    gigatoken: bool = False

    def shard_maker(self, on_bytes: OnBytes) -> Callable[[int], object]:
        """Load the tokenizer, in a worker process; return the function that makes a shard."""
        tokenizer = _load_tokenizer(self.options)
        if self.gigatoken:
            tokenizer = with_gigatoken(tokenizer)
        return functools.partial(self.make_shard, tokenizer, on_bytes)

    def make_shard(self, tokenizer: Tokenizer, on_bytes: OnBytes, number: int) -> None:
        """Write shard ``number`` and move it to the folder of finished shards."""
        folder = self.folder.staging / f"{number:06d}"
        with writing(folder):
            folder.mkdir()
        make_shard(self.options, self.plan, self.plan_hash, tokenizer, number, folder, on_bytes)
        self.folder.put_shard(folder, number)

    def check_sources(self, finished: Sequence[int], existing: Plan) -> None:
        """Reread the chunks of ``finished`` shards whose sources were modified since.

        Raises:
            UserError: naming the first source whose content has changed.
        """
        modified = {
            number
            for number, (source, before) in enumerate(
                zip(self.plan.sources, existing.sources, strict=True)
            )
            if source.modified_ns != before.modified_ns
        }
        if not modified:
            return
        total = sum(map(self.plan.shard_bytes, finished))
        with progress_bar(total, "B", "reading again") as bar:
            reader = self._reader(bar.update)
            for number in finished:
                hashes = self._load(number).hashes
                for chunk, before in zip(self.plan.shards[number], hashes, strict=True):
                    if chunk.source not in modified:
                        continue
                    for _ in reader.read(chunk):
                        pass
                    if reader.hashes[chunk] != before:
                        raise UserError(
                            f"{self.plan.sources[chunk.source].name} has changed since it was read "
                            f"for {existing.root}; restore it, or remove {existing.root} to start "
                            "from scratch"
                        )

    def make_shards(self, wanted: Sequence[int], tokenizer: Tokenizer) -> None:
        """Make those of the ``wanted`` shards that are missing."""
        finished = self.folder.finished()
        missing = [number for number in wanted if number not in finished]
        if not missing:
            return
        chunks = [chunk for number in missing for chunk in self.plan.shards[number]]
        reader = self._reader()
        sample = (document.text for chunk in chunks for document in reader.read(chunk))
        tokenizer = with_encoder(tokenizer, self.options.encoding.encoder, sample)
        num_workers = self.options.workers
        if num_workers is None:
            is_size_unknown = any(self.plan.sources[c.source].kind == "dataset" for c in chunks)
            num_bytes = sum(chunk.bytes for chunk in chunks)
            worth = is_size_unknown or num_bytes >= _BYTES_WORTH_A_PROCESS
            # Each reads and encodes concurrently, which keeps more than a core busy.
            num_workers = max(1, len(os.sched_getaffinity(0)) - 1) if worth else 1
        num_workers = min(num_workers, len(missing))
        total = sum(map(self.plan.shard_bytes, missing))
        with progress_bar(total, "B", "tokenizing") as bar:
            if num_workers > 1:
                run = dataclasses.replace(self, gigatoken=tokenizer.fast_encoder is not None)
                del tokenizer  # the workers have their own and need its memory
                work_in_processes(run.shard_maker, missing, num_workers, bar.update)
                return
            for number in missing:
                self.make_shard(tokenizer, bar.update, number)

    def join(self, found: Sequence[int], tokenizer: Tokenizer, stopwatch: Stopwatch) -> Joined:
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
        if self.options.domains.domain_key is not None:  # otherwise reported with the sources
            renamed = {name for shard in shards for name in shard.renamed}
            if unused := self.options.domains.unused_renames(renamed):
                warnings.warn(unused, stacklevel=2)
        check_domains(joined.domains, self.plan.sources, self.options.min_tokens_per_split)
        tokenizer.save(made)
        cost = Cost(
            device_seconds=sum(shard.seconds for shard in shards) + joining.seconds(),
            wall_seconds=stopwatch.seconds() + sum(shards[number].seconds for number in found),
        )
        sources_hash = _write_sources(made / SOURCES_NAME, self.plan, shards)
        # The corpus does not depend on which process or machine did which part of the work.
        options = dataclasses.replace(self.options, workers=None, shard=None)
        inputs = {"tokenizer": tokenizer.sha256, "sources": sources_hash}
        Corpus(
            root=made,
            tokenizer=tokenizer.identity,
            dtype=tokenizer.token_type,
            domains=joined.domains,
            provenance=provenance(options, inputs),
            cost=cost,
            not_written=joined.not_written,
        ).save()
        self.folder.publish(made)
        return joined

    def _reader(self, on_bytes: OnBytes = lambda num_bytes: None) -> DocumentReader:
        return DocumentReader(
            self.options.source, self.plan.sources, self.options.domains, on_bytes
        )

    def _load(self, number: int) -> Shard:
        shard = Shard.load(self.folder.shard_folder(number))
        if shard.plan != self.plan_hash:
            raise UserError(
                f"{shard.root} belongs to another plan than {self.folder.partial / Plan.FILE_NAME}"
                f"; remove {shard.root} and run the same command again"
            )
        shard.check_files()
        return shard


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
        parts = {split: domain.split(split) for split in SPLITS}
        for split, part in parts.items():
            if part.documents == 0:
                documents = sum(part.documents for part in parts.values())
                names = [source.name for source in sources if source.domain in (name, None)]
                raise UserError(
                    f"domain '{name}' has no document in {split}, and {documents} in all, from "
                    f"{' or '.join(names[:3])}; add documents, or change --split"
                )
            if part.tokens < min_tokens:
                raise UserError(
                    f"domain '{name}' has {part.tokens} tokens in {split}, fewer than "
                    f"--min-tokens-per-split {min_tokens}; add text, or give {split} a larger share"
                )


@dataclasses.dataclass(frozen=True)
class _SourcesRead(FileRecord):
    """Contents of sources.json: name, bytes and chunks of each source."""

    KIND = "sources of a corpus"
    MADE_BY = "tools/preprocess_data.py writes it"

    sources: list[dict[str, Any]]


def _write_sources(path: Path, plan: Plan, shards: Sequence[Shard]) -> str:
    """Record every source and the hash of each of its chunks; return one hash of all contents."""
    chunks: list[list[dict[str, Any]]] = [[] for _ in plan.sources]
    for planned, shard in zip(plan.shards, shards, strict=True):
        for chunk, sha256 in zip(planned, shard.hashes, strict=True):
            read = {"start": chunk.start, "stop": chunk.stop, "sha256": sha256}
            chunks[chunk.source].append(read)
    sources = [
        {"name": source.name, "bytes": source.bytes, "pieces": read}
        for source, read in zip(plan.sources, chunks, strict=True)
    ]
    _SourcesRead(sources).save(path)
    return sha256_of_json([chunk["sha256"] for read in chunks for chunk in read])


def _summary(corpus: Corpus, malformed: MalformedLines) -> str:
    """A table with a row per domain and the total, and the documents left out."""
    import pandas as pd

    rows: dict[str, dict[str, float]] = {}
    for name, domain in corpus.domains.items():
        parts = {split: domain.split(split) for split in SPLITS}
        left_out = corpus.not_written[name]
        rows[name] = {
            "documents": sum(part.documents for part in parts.values()),
            **{f"{split} tokens": part.tokens for split, part in parts.items()},
            "bytes/token": sum(part.text_bytes for part in parts.values()),
            "duplicates": left_out.duplicates,
            "held out": left_out.held_out,
            "empty": left_out.empty,
            "malformed": left_out.malformed,
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    total = {**table.sum(), "malformed": malformed.count}
    table = pd.concat([table, pd.DataFrame(total, index=["total"])])
    table["bytes/token"] /= table[[f"{split} tokens" for split in SPLITS]].sum(axis="columns")
    if not total["held out"]:
        del table["held out"]
    table.columns.name = "domain"
    formats = dict.fromkeys(table, "{:,}".format) | {"bytes/token": "{:.2f}".format}
    widths = {name: len(name) + 1 for name in table}
    text = table.to_string(formatters=formats, col_space=widths)
    if malformed.unwanted:
        text += (
            f"\n--rename-domain leaves out {sum(malformed.unwanted.values()):,} documents, of "
            f"{quoted(malformed.unwanted)}"
        )
    return text


# Worker processes


def work_in_processes(
    work: Work, numbers: Sequence[int], num_workers: int, on_bytes: OnBytes
) -> None:
    """Call the function that ``work`` returns with all ``numbers``, in order, in new processes.

    The processes never outlive this one.

    Args:
        work: pickled, and called once per process to set it up, with the function to call with the
            number of bytes just read.
        numbers: arguments of the function that it returns.
        num_workers: number of processes, at most one per number.
        on_bytes: called with the number of bytes that workers have read.

    Raises:
        UserError: raised by a worker, or because a worker was killed.
        RuntimeError: with the traceback of a worker that failed for another reason.
        KeyboardInterrupt: if a worker received SIGTERM.
    """
    # A new interpreter each: a forked copy could inherit locks that our threads hold.
    context = multiprocessing.get_context("spawn")
    num_workers = min(num_workers, len(numbers))
    num_bytes, taken = context.Value("q"), context.Value("q")
    received, errors = context.Pipe(duplex=False)
    arguments = (work, numbers, num_workers, num_bytes, taken, errors)
    workers = [context.Process(target=_work, args=arguments) for _ in range(num_workers)]
    reported = 0
    try:
        # Processes that are started while Ctrl-C is blocked never receive it; this one ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for worker in workers:
                worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        running = list(workers)
        while running:
            sentinels = [worker.sentinel for worker in running]
            ended = wait([received, *sentinels], _SECONDS_BETWEEN_REPORTS)
            total = num_bytes.get_obj().value  # a killed worker may hold the lock
            on_bytes(total - reported)
            reported = total
            if received in ended:
                raise received.recv()
            for worker in [worker for worker in running if worker.sentinel in ended]:
                running.remove(worker)
                worker.join()
                status = worker.exitcode or 0
                if status == -signal.SIGTERM:
                    raise KeyboardInterrupt
                if status < 0:
                    raise UserError(
                        f"a worker process was killed by {signal.Signals(-status).name}, as "
                        "happens when memory runs out: use fewer --workers, or run the same "
                        "command again"
                    )
                if status:
                    raise RuntimeError(f"a worker process exited with status {status}")
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _work(
    work: Work,
    numbers: Sequence[int],
    num_workers: int,
    num_bytes: Synchronized[int],
    taken: Synchronized[int],
    errors: Connection,
) -> None:
    """Process the next of ``numbers`` until all are taken."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # For libraries that would use all cores.
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    warnings.simplefilter("ignore")  # the parent process has warned

    def add(counter: Synchronized[int], count: int) -> int:
        with counter.get_lock():
            counter.value += count
            return counter.value

    try:
        task = work(functools.partial(add, num_bytes))
        while (position := add(taken, 1) - 1) < len(numbers):
            task(numbers[position])
    except BaseException as error:
        problem: Exception = RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
        if isinstance(error, UserError):
            problem = error
        elif message := system_error_message(error):
            problem = UserError(f"{message}; fix that and run the same command again")
        with taken.get_lock():
            errors.send(problem)
        sys.exit(1)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
