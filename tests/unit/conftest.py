"""Fixtures of the tests that build, train or read models, all on one rank in this process."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Unit tests compare results with plain loops on the CPU, so hide any GPU of this machine.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis
import pytest

# Tests would sometimes exceed Hypothesis's deadlines, because cores are shared and a first call may
# import or compile code.
hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.parallel.layout import Layout
    from megatron_chameleon.training.options import PretrainOptions
    from tests.object_store import ObjectStore


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Layout]:
    """Set up process groups of one rank while the tests of a module run.

    These tests must not use functions or fixtures that set up process groups themselves:
    ``pretrain``, ``compute_mixture``, ``evaluate_perplexities``, or the fixtures ``finished_run``
    and ``trained_run``.
    """
    from megatron_chameleon.parallel.layout import distributed
    from megatron_chameleon.parallel.options import ParallelOptions

    with distributed(ParallelOptions(), seed=0) as layout:
        yield layout


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of three domains, for reading only."""
    from tests.small_corpus import write_small_corpus

    return write_small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def held_out_corpus(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """``corpus`` with the domain poems held out from training, for reading only."""
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.corpus.import_corpus import import_corpus
    from megatron_chameleon.corpus.options import ImportOptions

    output = tmp_path_factory.mktemp("held-out") / "corpus"
    import_corpus(ImportOptions(output, corpus=corpus.root, held_out="poems"))
    return Corpus.load(output)


@pytest.fixture(scope="session")
def leaked_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus whose held-out domain poems has 20 training documents of news; for reading only."""
    from megatron_chameleon.artifacts import SPLITS, Corpus
    from megatron_chameleon.corpus.domains import open_domains
    from megatron_chameleon.corpus.import_corpus import import_corpus
    from megatron_chameleon.corpus.options import ImportOptions
    from tests.small_corpus import DOMAINS, write_corpus, write_small_corpus

    root = tmp_path_factory.mktemp("leaked")
    opened = open_domains(write_small_corpus(root / "before"))
    documents = {}
    for name in DOMAINS:
        files = {split: opened.open(name, split) for split in SPLITS}
        documents[name] = {
            split: [file.get(number)[:-1] for number in range(len(file))]
            for split, file in files.items()
        }
    leaked = documents["news"]["train"][:20]
    documents["poems"] |= {"valid": leaked, "test": leaked}
    corpus = write_corpus(root / "whole", documents)
    import_corpus(ImportOptions(root / "corpus", corpus=corpus.root, held_out="poems"))
    return Corpus.load(root / "corpus")


@pytest.fixture(scope="session")
def numbers_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus whose tokenizer's words are its token ids, for reading only."""
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.corpus.tokenizer import recorded_tokenizer_file
    from tests.huggingface_models import write_tokenizer
    from tests.small_corpus import EOD, write_small_corpus

    corpus = write_small_corpus(tmp_path_factory.mktemp("numbers") / "corpus")
    write_tokenizer(corpus.root, [str(number) for number in range(EOD)])
    file = recorded_tokenizer_file(corpus.root / corpus.tokenizer.file, corpus.tokenizer)
    identity = dataclasses.replace(corpus.tokenizer, sha256=file.sha256)
    dataclasses.replace(corpus, tokenizer=identity).save()
    return Corpus.load(corpus.root)


@pytest.fixture(scope="session")
def pretrain_options(corpus: Corpus) -> Callable[..., PretrainOptions]:
    """``pretrain_options(run_dir, **changes)``: six steps of a nano model on ``corpus``."""
    from megatron_chameleon.training.options import OptimizerOptions, PretrainOptions

    def options(run_dir: Path, **changes: object) -> PretrainOptions:
        settings: dict[str, object] = {
            "corpus": corpus.root,
            "model": "nano",
            "seq_length": 32,
            "train_iters": 6,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "log_interval": 2,
            "save_interval": 3,
            "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
        }
        return PretrainOptions(run_dir=run_dir, **{**settings, **changes})  # type: ignore[arg-type]

    return options


@pytest.fixture(scope="session")
def finished_run(
    pretrain_options: Callable[..., PretrainOptions], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run with checkpoints of steps 3 and 6, for reading only."""
    from megatron_chameleon.training.trainer import pretrain

    run_dir = tmp_path_factory.mktemp("run") / "nano"
    pretrain(pretrain_options(run_dir))
    return run_dir


@pytest.fixture
def trained_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of ``finished_run`` that the test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "trained"))


@pytest.fixture(scope="session")
def running_object_store() -> Iterator[ObjectStore]:
    """An S3 server that runs until the last test."""
    from tests.object_store import serve

    with serve() as store:
        yield store


@pytest.fixture
def object_store(running_object_store: ObjectStore) -> Iterator[ObjectStore]:
    """An S3 server with an empty bucket and without faults."""
    store = running_object_store
    yield store
    store.faults.clear()
    store.requests.clear()
    if objects := store.system.find(store.bucket):
        store.system.rm(objects)
