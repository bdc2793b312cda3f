"""The embedding store: one vector per sampled window, a file per domain."""

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
from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.files import replacing, writing
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import Count, FolderRecord, InnerPath, Positive
from megatron_chameleon.errors import UserError

FILE_NAME = "store.json"
FORMAT_VERSION = 1
MADE_BY = "tools/compute_mixture.py writes it"


@dataclasses.dataclass(frozen=True)
class EmbeddingRecipe:
    """What a vector depends on. Two stores with the same recipe can be compared.

    Attributes:
        model_hash: of the proxy's weights.
        layer: hidden states after this many transformer layers.
        window_length: tokens in a window, at most.
        num_windows: windows drawn per domain, at most.
        seed: of the draw.
        tokenizer_hash: of the tokenizer that made the tokens.
        cross_documents: whether a window may run over the end of a document.
        dtype: what the proxy computed in.
        final_norm: whether the proxy's final layer norm was applied to the hidden states.
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
    """One file of the store.

    Attributes:
        file: its name.
        windows: vectors in it.
        corpus_hash: of the domain's token files.
        sha256: hex, of the file; None in stores of releases that kept none.
    """

    file: InnerPath
    windows: Count
    corpus_hash: str
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingStore(FolderRecord):
    """What ``store.json`` says; ``root`` is the folder it was read from."""

    KIND = "embedding store"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    recipe: EmbeddingRecipe
    hidden_size: Positive
    domains: dict[str, DomainEmbeddings]
    provenance: Provenance
    cost: Cost

    def with_domain(
        self, name: str, vectors: NDArray[np.float32], corpus_hash: str, cost: Cost
    ) -> EmbeddingStore:
        """Write the window ``vectors`` [n, h] of a domain and return the store that lists them.

        What another process has written to the same store meanwhile is kept, and is in it too.

        Raises:
            UserError: if another process has made it a store of another recipe, or the disk is
                full.
        """
        file = f"{file_name_of(name)}.safetensors"
        # Not by save_file, which has errors of its own for a full disk.
        content = save({"vectors": np.ascontiguousarray(vectors, dtype=np.float32)})
        sha256 = hashlib.sha256(content).hexdigest()
        entry = DomainEmbeddings(file, len(vectors), corpus_hash, sha256)
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(self.root):
            now = EmbeddingStore.load(self.root) if EmbeddingStore.exists(self.root) else self
            if now.recipe != self.recipe:
                raise UserError(
                    f"another command has filled {self.root} by another recipe meanwhile; give "
                    "another --store"
                )
            with replacing(self.root / file) as temporary:
                temporary.write_bytes(content)
            store = dataclasses.replace(
                now, domains={**now.domains, name: entry}, cost=now.cost + cost
            )
            store.save()
        return store

    def holds(self, name: str, corpus_hash: str) -> bool:
        """Whether the vectors of domain ``name`` are here and made from those token files.

        Vectors without a checksum are not: a changed bit of theirs would change the weights.
        """
        entry = self.domains.get(name)
        return (
            entry is not None
            and entry.corpus_hash == corpus_hash
            and entry.sha256 is not None
            and (self.root / entry.file).is_file()
        )

    def vectors(self, name: str) -> NDArray[np.float32]:
        """Window vectors [n, h] in float32 of one domain, all finite.

        Raises:
            UserError: if the file is damaged or does not hold what store.json says.
        """
        entry = self.domains[name]
        path = self.root / entry.file
        try:
            content = path.read_bytes()
            if entry.sha256 not in (None, hashlib.sha256(content).hexdigest()):
                raise ValueError(f"its SHA-256 is not the one in {FILE_NAME}")
            vectors: NDArray[np.float32] = load(content)["vectors"]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"cannot read {path} ({error}); delete it and run again") from error
        expected = (entry.windows, self.hidden_size)
        if vectors.shape != expected or vectors.dtype != np.float32:
            raise UserError(
                f"{path} holds {vectors.dtype} of shape {vectors.shape}, {FILE_NAME} says float32 "
                f"of {expected}; delete it and run again"
            )
        if not np.isfinite(vectors).all():
            raise UserError(
                f"{path}: the embeddings of domain '{name}' are not finite (NaN or infinite), so "
                f"their model or its arithmetic is broken; delete {self.root} and run "
                "tools/compute_mixture.py again, with a proxy whose loss is finite"
            )
        return vectors


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A block that one process enters at a time, where the disk has locks of folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
