"""Options of the training data: data sets, sample order and document boundaries."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

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
    """Mask attention across documents; slower, since it needs a mask per sample."""
    eod_mask_loss: bool = False
    """Mask the loss of predictions from an end-of-document token."""
