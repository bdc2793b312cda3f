"""Open the model that a path names: a run, a checkpoint, or a Hugging Face folder or name."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    TokenizerIdentity,
    find_checkpoint,
)
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.record import check_values
from megatron_chameleon.checkpoint.huggingface import (
    download,
    find_weights,
    is_huggingface_folder,
    read_tensors,
)
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.checkpoint.megatron import find_megatron_folder, megatron_record
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.tokenizer import (
    Tokenizer,
    corpus_tokenizer,
    load_tokenizer,
    same_ids,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.huggingface_config import (
    CONFIG_NAME,
    FoundConfig,
    read_model_config,
)
from megatron_chameleon.model.huggingface_tensors import Tensors, checked_tensors, load_huggingface
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.parallel.layout import Layout

# A name on the Hugging Face hub: OWNER/MODEL.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_model(
    path: Path,
    flag: str = "--checkpoint",
    tokenizer: TokenizerChoice | None = None,
    *,
    with_code: bool = False,
    allow_pickle: bool = False,
) -> Model:
    """Open the model at ``path``, without loading its weights.

    The files of a checkpoint are read once, to verify or to hash them.

    Args:
        path: a run (its latest checkpoint) or a checkpoint of this package, a checkpoint of
            Megatron-LM, a Hugging Face folder, or the name OWNER/MODEL of a model on the Hugging
            Face hub, which is downloaded.
        flag: the option with this path, for messages.
        tokenizer: location of the model's tokenizer; default: the recorded one.
        with_code: download the Python code of a model on the hub too.
        allow_pickle: accept weights of a Hugging Face folder in torch's own format.

    Raises:
        UserError: if there is no such model, it is damaged, or it is not supported.
    """
    choice = tokenizer or TokenizerChoice()
    # A name whose first part is a folder here is a path with a mistake.
    if not path.exists() and _HUB_NAME.fullmatch(str(path)) and not path.parent.is_dir():
        path = download(str(path), flag, with_code=with_code)
    # A Hugging Face folder may hold a metadata.json, like a checkpoint of Megatron-LM.
    if is_huggingface_folder(path):
        files = tuple(find_weights(path, allow_pickle=allow_pickle))
        return HuggingFaceModel(path, files, choice, flag)
    if (folder := find_megatron_folder(path)) is not None:
        return CheckpointModel(megatron_record(folder, choice), choice, flag)
    return CheckpointModel(CheckpointRecord.load(find_checkpoint(path, flag)), choice, flag)


class Model(ABC):
    """A model on disk, whose weights are read when they are loaded."""

    choice: TokenizerChoice
    """Location of its tokenizer, for a model whose own tokenizer cannot be found."""
    flag: str
    """The option that named the model, for messages."""

    @property
    @abstractmethod
    def where(self) -> Path:
        """Folder of the model, for messages."""

    @property
    @abstractmethod
    def hash(self) -> str:
        """Hex SHA-256 that identifies the weights."""

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """Shape of the model.

        Raises:
            UserError: if the model is not supported, or too large for its files.
        """

    @property
    @abstractmethod
    def tokenizer_choice(self) -> TokenizerChoice:
        """The user's choice, completed by what the model records; its files may have moved."""

    @property
    def step(self) -> int:
        """Optimizer steps of its training; 0 if it was trained elsewhere."""
        return 0

    @property
    def trained_tokens(self) -> int:
        """Training tokens seen; 0 if it was trained elsewhere."""
        return 0

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run that may have trained it; None if it was trained elsewhere."""
        return None

    @property
    def left_out(self) -> Sequence[str]:
        """Describe the weights and settings that are not loaded, one line each."""
        return ()

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer that the model was trained with.

        Raises:
            UserError: if the tokenizer cannot be found, or is not that of the model.
        """

    @abstractmethod
    def has_ids_of(self, tokenizer: TokenizerIdentity, path: Path) -> bool | None:
        """Return whether every id of ``tokenizer`` means the same to the model; None if unknown.

        Args:
            tokenizer: the tokenizer of the tokens to read.
            path: its file, which may be missing.
        """

    @abstractmethod
    def with_vocabulary(
        self, tokenizer: TokenizerIdentity, where: object, *, is_own: bool = True
    ) -> Self:
        """Return the model with the vocabulary of ``tokenizer``, as far as it has embeddings.

        The embeddings of public models are padded beyond the vocabulary of their tokenizer. Others
        have fewer embeddings than tokens; :func:`require_embeddings` then rejects text with them.

        Args:
            tokenizer: the tokenizer of the tokens to read.
            where: what has this tokenizer, for messages.
            is_own: whether this is known to be the model's tokenizer. If it is not, every token
                must have an embedding.

        Raises:
            UserError: if the model's vocabulary does not fit.
        """

    def _require_eod(self, rows: int, tokenizer: TokenizerIdentity, where: object) -> None:
        """Raise UserError if the end-of-document token is not among the model's ``rows``."""
        if tokenizer.eod_id >= rows:
            raise UserError(
                f"{self.where} has {rows} embeddings, but the end-of-document token of the "
                f"tokenizer of {where} is {tokenizer.eod_id}; use the model's own tokenizer "
                f"(--tokenizer-model) and end-of-document token, or pass another {self.flag}"
            )

    def for_tokens(self, tokenizer: TokenizerIdentity, path: Path, where: object) -> Self:
        """Return the model with the vocabulary of ``tokenizer``; the arguments are as above.

        Raises:
            UserError: if an id of ``tokenizer`` has another meaning to the model.
        """
        has_ids = self.has_ids_of(tokenizer, path)
        if has_ids is False:
            raise UserError(
                f"{self.where} was trained with another tokenizer than that of {where}, and the "
                "token ids differ; preprocess the text again with the model's tokenizer "
                f"(--tokenizer-model), or pass another {self.flag}"
            )
        return self.with_vocabulary(tokenizer, where, is_own=has_ids is True)

    def for_corpus(self, corpus: Corpus) -> Self:
        """Return the model with the vocabulary of ``corpus``; see :meth:`for_tokens`."""
        path = corpus.root / corpus.tokenizer.file
        return self.for_tokens(corpus.tokenizer, path, corpus.root)

    def with_own_vocabulary(self) -> tuple[Self, Tokenizer]:
        """Return the model with the vocabulary of its own tokenizer, and this tokenizer.

        Raises:
            UserError: if there is no tokenizer, or the model's vocabulary does not fit.
        """
        tokenizer = self.tokenizer()
        return self.with_vocabulary(tokenizer.identity, tokenizer.path), tokenizer

    @abstractmethod
    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Load the weights into ``chunks``, this rank's part of the model. Collective.

        Raises:
            UserError: if the weights are damaged, or belong to another model.
        """

    def check_weights(self) -> None:
        """Raise UserError for weights that do not match the config, before anything is written."""
        _ = self.config  # the weights of a checkpoint were verified when it was opened

    def reader(self, layout: Layout, *, bf16: bool = False) -> Reader:
        """Build this rank's part of the model in evaluation mode, and load its weights. Collective.

        The model computes in float32 by default, regardless of the training dtype, so that
        embeddings and losses agree across layouts and devices; ``bf16`` is faster.
        """
        model = build_model(self.config, layout, seed=0, bf16=bf16)
        self.load([model])
        model.eval()
        return Reader(model=unwrap(model), config=self.config, layout=layout)


@dataclasses.dataclass(frozen=True)
class CheckpointModel(Model):
    """A checkpoint of this package or of Megatron-LM.

    Attributes:
        record: its checkpoint.json; for Megatron-LM, the same made from the files.
    """

    record: CheckpointRecord
    choice: TokenizerChoice = dataclasses.field(default_factory=TokenizerChoice)
    flag: str = "--checkpoint"

    @property
    def where(self) -> Path:
        """Folder of the checkpoint."""
        return self.record.root

    @property
    def hash(self) -> str:
        """Hash of the tensor files."""
        return self.record.hash

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The recorded model."""
        where, hint = f"{self.where}/checkpoint.json", "the checkpoint is damaged; use another"
        config = check_values(where, ModelConfig, self.record.model, hint, "model")
        held = sum(file.bytes for file in self.record.files.values())
        config.require_bytes(held, f"{where}: field model")
        return config

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.record.step

    @property
    def trained_tokens(self) -> int:
        """Training tokens seen."""
        return sum(self.record.domain_tokens.values())

    @property
    def run_dir(self) -> Path:
        """The run that contains the checkpoint, if it is in a run."""
        return self.where.absolute().parent.parent

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The user's choice, or else what a training run or a conversion recorded.

        A relative path is resolved from the run's working directory, or if nothing is found there,
        from the current directory.
        """
        made, choice = self.record.provenance, self.choice
        options = made.options
        data = options if options.get("corpus") else options.get("data") or options
        place = options.get("corpus") or data.get("tokenizer_model") or options.get("model")
        path = choice.tokenizer_model
        if path is None and place:
            from_start = Path(made.working_folder or ".") / place
            is_here = Path(place).exists() and not from_start.exists()
            path = Path(place) if is_here else from_start
        return TokenizerChoice(
            tokenizer_model=path,
            tiktoken_pattern=choice.tiktoken_pattern or data.get("tiktoken_pattern"),
            eod_token=choice.eod_token or data.get("eod_token"),
        )

    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer of the training data."""
        found, where = self.tokenizer_choice, self.where
        path = found.tokenizer_model
        if path is None or not (self.choice.tokenizer_model or path.exists()):
            problem = f"is no longer at {path}" if path else "is not recorded"
            raise UserError(
                f"the tokenizer of {where} {problem}; pass the tokenizer, or a corpus made with "
                "it, with --tokenizer-model"
            )
        tokenizer = _open_tokenizer(found, self.choice)
        if found.eod_token is None and not Corpus.exists(path):
            warnings.warn(
                f"{where} does not record its end-of-document token: assuming "
                f"{tokenizer.eod_token}; pass --eod-token, or the corpus with --tokenizer-model",
                stacklevel=2,
            )
        if tokenizer.sha256 != self.record.tokenizer_hash:
            raise UserError(
                f"{tokenizer.path} is not the tokenizer that {where} was trained with (its hash "
                "differs); pass that tokenizer, or a corpus made with it, with --tokenizer-model"
            )
        return tokenizer

    def has_ids_of(self, tokenizer: TokenizerIdentity, path: Path) -> bool:
        """Return whether ``tokenizer`` is that of the training data."""
        return self.record.tokenizer_hash == tokenizer.sha256

    def with_vocabulary(
        self, tokenizer: TokenizerIdentity, where: object, *, is_own: bool = True
    ) -> Self:
        """Check the vocabulary, which is that of the tokenizer if there are enough embeddings."""
        self._require_eod(self.config.vocab_size, tokenizer, where)
        if self.config.vocab_size > tokenizer.vocab_size:
            raise UserError(
                f"{self.where} has a vocabulary of {self.config.vocab_size} tokens, but the "
                f"tokenizer of {where} has {tokenizer.vocab_size}; pass another {self.flag}"
            )
        return self

    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Load the weights, in any layout."""
        load_weights(self.record, chunks)


@dataclasses.dataclass(frozen=True)
class HuggingFaceModel(Model):
    """A Hugging Face folder. Its weights load into our model if its family is supported.

    Attributes:
        folder: the folder.
        files: files that hold the weights.
        vocab_size: number of embedding rows to load; None for all.
    """

    folder: Path
    files: tuple[Path, ...]
    choice: TokenizerChoice = dataclasses.field(default_factory=TokenizerChoice)
    flag: str = "--checkpoint"
    vocab_size: int | None = None

    @property
    def where(self) -> Path:
        """The folder."""
        return self.folder

    @functools.cached_property
    def found(self) -> FoundConfig:
        """The model that its config.json describes."""
        found = read_model_config(self.where)
        held = sum(path.stat().st_size for path in self.files)
        found.config.require_bytes(held, str(self.where / CONFIG_NAME))
        return found

    @functools.cached_property
    def hash(self) -> str:
        """Hash of the config and the weight files."""
        return sha256_of_files(self.where / CONFIG_NAME, *self.files)

    @property
    def config(self) -> ModelConfig:
        """The model, with the embedding rows that are loaded."""
        config = self.found.config
        return dataclasses.replace(config, vocab_size=self.vocab_size or config.vocab_size)

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The user's choice, or else the tokenizer in the folder."""
        path = self.choice.tokenizer_model or self.where
        return TokenizerChoice(
            tokenizer_model=path,
            tiktoken_pattern=self.choice.tiktoken_pattern,
            eod_token=self.choice.eod_token,
        )

    @property
    def left_out(self) -> Sequence[str]:
        """Describe embedding rows beyond the vocabulary, and dropout."""
        rows, loaded, lines = self.found.config.vocab_size, self.config.vocab_size, []
        if rows > loaded:
            lines.append(
                f"the last {rows - loaded} of its {rows} embedding rows are not loaded: "
                f"the tokenizer has {loaded} tokens"
            )
        if dropout := self.found.dropout:
            lines.append(
                f"its dropout of {dropout:g} is not used: pass --hidden-dropout and "
                "--attention-dropout to train with dropout"
            )
        return lines

    def tokenizer(self) -> Tokenizer:
        """Open the user's choice, or else the tokenizer in the folder."""
        return _open_tokenizer(self.tokenizer_choice, self.choice)

    def has_ids_of(self, tokenizer: TokenizerIdentity, path: Path) -> bool | None:
        """Compare with the tokenizer in the folder; None if the folder has none."""
        return same_ids(tokenizer, path, self.where)

    def with_vocabulary(
        self, tokenizer: TokenizerIdentity, where: object, *, is_own: bool = True
    ) -> Self:
        """Load only the embeddings of the tokenizer."""
        rows, size = self.found.config.vocab_size, tokenizer.vocab_size
        if rows < size and not is_own:
            raise UserError(
                f"{self.where / CONFIG_NAME}: a vocabulary of {rows} is too small for {where}, "
                f"whose tokenizer has {size} tokens; use the model's own tokenizer "
                f"(--tokenizer-model), or pass another {self.flag}"
            )
        self._require_eod(rows, tokenizer, where)
        return dataclasses.replace(self, vocab_size=min(rows, size))

    def read(self) -> Tensors:
        """Read the tensors into CPU memory, under their Hugging Face names.

        Raises:
            UserError: if the tensors are damaged, or do not match the config.
        """
        return checked_tensors(read_tensors(self.files), self.found.config, str(self.where))

    def check_weights(self) -> None:
        """Read the tensors."""
        self.read()

    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Read the tensors, and load this rank's shards."""
        tensors = self.read()
        for chunk in chunks:
            load_huggingface(unwrap(chunk), tensors, self.config)


def _open_tokenizer(found: TokenizerChoice, choice: TokenizerChoice) -> Tokenizer:
    """Open the tokenizer at ``found``, or that of the corpus there; ``choice`` is the user's."""
    path = found.tokenizer_model
    assert path is not None
    if Corpus.exists(path):
        choice.reject_changed(("tiktoken_pattern", "eod_token"), f"the corpus {path} records it")
        return corpus_tokenizer(Corpus.load(path))
    return load_tokenizer(path, found.eod_token, found.tiktoken_pattern)
