"""Options of the training data: data sets, sample order and document boundaries."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions

Permutation = Literal["megatron", "epoch", "feistel"]


@dataclasses.dataclass(frozen=True)
class DataOptions(CheckedOptions):
    """Training tokens and their order."""

    data_path: str | None = None
    """Megatron data sets instead of --corpus: alternating weights and prefixes, '0.3 PREFIX 0.7
    PREFIX'; without weights, prefixes are weighted by size. A PREFIX is a path, or a URL of fsspec
    such as s3://BUCKET/PREFIX. NAME=PREFIX names the domain; by default it is the shortest unique
    end of the path."""
    data_args_path: Path | None = None
    """A file that holds the value of --data-path, possibly on several lines."""
    split: str = "969,30,1"
    """Shares of train, valid and test in each data set of --data-path, in file order."""
    tokenizer_model: Path | None = None
    """The tokenizer of the data sets of --data-path; a --corpus records its own tokenizer."""
    tiktoken_pattern: str | None = None
    """Pre-tokenization pattern of a tiktoken --tokenizer-model, as in preprocess_data."""
    eod_token: str | None = None
    """The end-of-document token of --tokenizer-model; default as in preprocess_data."""
    mixture_change: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """STEP=MIXTURE: sample by another mixture ('uniform', or a file) from that step on.
    FIRST..LAST=MIXTURE: move there linearly, from the weights in force at step FIRST to the mixture
    at step LAST. Repeatable; changes can be added when a run is resumed. Needs --permutation epoch
    or feistel."""
    permutation: Permutation = "megatron"
    """Order of the samples. megatron: Megatron-LM's order; weights cannot change. epoch: domains
    follow a closed form, and documents and windows are reshuffled every epoch; weights can
    change. feistel: like epoch, but documents stay in file order; needs no memory."""
    data_cache_path: Path | None = None
    """Folder that stores the indices of --permutation megatron. Later starts reuse them, and the
    ranks of a machine share them; by default each rank builds them in memory."""
    object_storage_cache_path: Path | None = None
    """Folder on a local disk for the tokens that were read from URLs, and their .idx files. The
    ranks of a machine and later runs share it. The default is ~/.cache/megatron_chameleon, or a
    folder in $XDG_CACHE_HOME."""
    verify_corpus: bool = False
    """Read every token file of the corpus before the start and compare its hash."""

    @property
    def uses_data_path(self) -> bool:
        """Whether the data sets are those of --data-path or --data-args-path."""
        return self.data_path is not None or self.data_args_path is not None

    @property
    def mixture_changes(self) -> list[str]:
        """The values of every ``--mixture-change`` on the command line."""
        return [change for group in self.mixture_change for change in group]


@dataclasses.dataclass(frozen=True)
class DocumentBoundaryOptions(CheckedOptions):
    """Handling of document boundaries within a sample."""

    reset_position_ids: bool = False
    """Count positions from 0 again after every end-of-document token; not for rotary positions,
    which are relative."""
    reset_attention_mask: bool = False
    """Mask attention across documents. A mask per sample makes it slower, except with
    --document-attention flex."""
    eod_mask_loss: bool = False
    """Mask the loss of predictions from an end-of-document token."""


@dataclasses.dataclass(frozen=True)
class TraceOptions(CheckedOptions):
    """List the documents that each step of a training run read, from the run's record.

    Every line of the table is a range of a document's tokens in one sample, or, with --counts, a
    document. The samples are those of the run's own order, mixture changes and parallel layouts,
    which are recorded in run.json.
    """

    run: Path
    """The run folder."""
    steps: str | None = None
    """FIRST:LAST, both included, or a single step. Steps are numbered from 1, as in the log.
    Default with --counts and --find: all steps of the run."""
    counts: bool = False
    """Count for each document how many samples and tokens of it the steps read."""
    find: str | None = None
    """Only list documents whose text contains this string. The text of all documents is decoded."""
    text: bool = False
    """Add the text of each range of tokens; with --counts, of each document."""
    source_lines: bool = False
    """Add the file and the line (or row) from which each document was read. The raw text of the
    corpus is read again, and searched for the texts of the documents."""
    corpus: Path | None = None
    """The corpus of the run, if it was moved."""
    data_path: str | None = None
    """The --data-path of the run, if its files were moved."""
    tokenizer_model: Path | None = None
    """The tokenizer of the run, if it was moved; only --text, --find and --source-lines need it."""
    output: Path | None = None
    """A .jsonl or .csv file to write; the table that is printed shows only the first lines."""
    overwrite: bool = False
    """Replace an existing output file."""

    def __post_init__(self) -> None:
        """Raise UserError for invalid steps, or another suffix of the output."""
        super().__post_init__()
        _ = self.step_range  # raises for an invalid value
        if self.steps is None and not self.counts and self.find is None:
            raise UserError("pass --steps FIRST:LAST, --counts or --find TEXT")
        if self.find == "":
            raise UserError("--find is empty; pass a part of the document's text")
        if self.output is not None and self.output.suffix not in (".jsonl", ".csv"):
            raise UserError(f"--output {self.output}: must end in .jsonl or .csv")

    @property
    def step_range(self) -> tuple[int, int] | None:
        """First and last step; None for all steps."""
        if self.steps is None:
            return None
        first, colon, last = self.steps.partition(":")
        numbers = first, last if colon else first
        if not all(number.isdecimal() for number in numbers) or not (
            1 <= int(numbers[0]) <= int(numbers[1])
        ):
            raise UserError(
                f"--steps {self.steps}: must be FIRST:LAST with 1 <= FIRST <= LAST, or one step"
            )
        return int(numbers[0]), int(numbers[1])
