"""The embedding store: one vector per sampled window, one file per domain."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import replacing, writing
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import (
    Count,
    FolderRecord,
    InnerPath,
    Positive,
    differences,
)
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class EmbeddingRecipe:
    """Settings that determine the vectors. Stores with the same recipe are comparable.

    Attributes:
        model_hash: hash of the proxy's weights.
        layer: number of transformer layers before the hidden states.
        window_length: tokens per window.
        num_windows: maximum windows per domain.
        seed: random seed of the window sampling.
        tokenizer_hash: hash of the tokenizer of the embedded tokens, or of both tokenizers if a
            corpus is decoded for a proxy with another tokenizer.
        cross_documents: whether windows cross document boundaries and all have ``window_length``
            tokens; otherwise, a window lies in one document and has at most so many.
        dtype: compute precision of the proxy.
        final_norm: whether the proxy's final norm was applied to the hidden states.
    """

    model_hash: str
    layer: Count
    window_length: Positive
    num_windows: Positive
    seed: int
    tokenizer_hash: str
    cross_documents: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    final_norm: bool = False


@dataclasses.dataclass(frozen=True)
class DomainEmbeddings:
    """The file of one domain.

    Attributes:
        file: name of the file.
        windows: number of vectors.
        corpus_hash: hash that identifies the domain's text: of its token files, or for raw text of
            the names, sizes, times and ETags of its files.
        sha256: hex SHA-256 of the file.
        tokens: number of embedded tokens.
    """

    file: InnerPath
    windows: Count
    corpus_hash: str
    sha256: str
    tokens: Count


@dataclasses.dataclass(frozen=True)
class EmbeddingStore(FolderRecord):
    """The content of ``store.json``; ``root`` is its folder."""

    KIND = "embedding store"
    FILE_NAME = "store.json"
    MADE_BY = "megatron-chameleon compute_mixture writes it"

    recipe: EmbeddingRecipe
    hidden_size: Positive
    domains: dict[str, DomainEmbeddings]
    provenance: Provenance
    cost: Cost

    def write_domain(
        self, name: str, vectors: NDArray[np.float32], tokens: int, text_hash: str, cost: Cost
    ) -> EmbeddingStore:
        """Write the window ``vectors`` [n, h] of a domain; return the store with this domain.

        ``tokens`` is the number of tokens of all windows.

        Domains that other processes have written in the meantime are kept and included.

        Raises:
            UserError: if another process has filled the store with another recipe, or the disk is
                full.
        """
        file = f"{file_name_of(name)}.safetensors"
        # save_file is not used, since it raises errors other than OSError on a full disk.
        content = save({"vectors": np.ascontiguousarray(vectors, dtype=np.float32)})
        sha256 = hashlib.sha256(content).hexdigest()
        entry = DomainEmbeddings(file, len(vectors), text_hash, sha256, tokens)
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(self.root):
            now = EmbeddingStore.load(self.root) if EmbeddingStore.exists(self.root) else self
            now.require_recipe(self.recipe)
            with replacing(self.root / file) as temporary:
                temporary.write_bytes(content)
            store = dataclasses.replace(
                now, domains={**now.domains, name: entry}, cost=now.cost + cost
            )
            store.save()
        return store

    def require_recipe(self, recipe: EmbeddingRecipe) -> None:
        """Raise UserError unless the vectors were computed by ``recipe``."""
        for name, (stored, requested) in differences(self.recipe, recipe).items():
            found, hint = f"with {name} {stored}, not {requested}", ""
            if name == "cross_documents":
                kinds = ("within documents", "of one length")
                found = f"of windows {kinds[stored]}, not {kinds[requested]}"
                hint = "omit --within-documents, " if stored else "pass --within-documents, "
            raise UserError(
                f"{self.root} holds embeddings {found}; {hint}delete this folder, or choose "
                "another one"
            )

    def holds(self, name: str, text_hash: str) -> bool:
        """Whether the store has vectors of ``name``, from tokens or text with this hash."""
        entry = self.domains.get(name)
        return (
            entry is not None
            and entry.corpus_hash == text_hash
            and (self.root / entry.file).is_file()
        )

    def vectors(self, name: str) -> NDArray[np.float32]:
        """The window vectors [n, h] of one domain, float32 and finite.

        Raises:
            UserError: if the file is damaged or disagrees with store.json.
        """
        entry = self.domains[name]
        path, expected = self.root / entry.file, (entry.windows, self.hidden_size)
        try:
            content = path.read_bytes()
            if entry.sha256 != hashlib.sha256(content).hexdigest():
                raise ValueError(f"its SHA-256 differs from {self.FILE_NAME}")
            vectors: NDArray[np.float32] = load(content)["vectors"]
            if vectors.shape != expected or vectors.dtype != np.float32:
                raise ValueError(f"{vectors.dtype} {vectors.shape}, not float32 {expected}")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"cannot read {path} ({error}); delete it and run again") from error
        if not np.isfinite(vectors).all():
            raise UserError(
                f"{path}: embeddings of domain '{name}' are NaN or infinite; delete {self.root} "
                "and run again with a proxy whose loss is finite"
            )
        return vectors


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on ``folder``, on file systems that support it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
