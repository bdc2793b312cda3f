"""Real text from this machine: installed source code and documentation, without duplicates."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from megatron_chameleon.corpus.installed_text import default_roots, list_files
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe

SYSTEM_ROOTS = ("/usr/share", "/usr/lib", "/usr/include", "/usr/local/include")
COMPILED = frozenset((".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".inl", ".pyx"))
SCRIPTS = frozenset((".js", ".php", ".pl", ".pm", ".py", ".pyi", ".rb", ".sh", ".tcl", ".vim"))
DOCUMENTATION = frozenset((".html", ".md", ".pod", ".rst", ".tex", ".txt"))
SMALLEST, LARGEST = 200, 1_000_000


class RealText(NamedTuple):
    """Number of documents written, and bytes of their UTF-8 text."""

    documents: int
    text_bytes: int


def write_real_text(path: Path, num_bytes: int) -> RealText:
    """Write JSON lines {"text": ...} of about ``num_bytes`` of text, or all available text.

    Files are ordered by a hash of their paths, so that kinds of text are mixed, and duplicates are
    dropped. The same installation gives the same file.
    """
    documents = text_bytes = 0
    with path.open("wb") as stream:
        for text in _texts():
            stream.write(orjson.dumps({"text": text}, option=orjson.OPT_APPEND_NEWLINE))
            documents += 1
            text_bytes += len(text.encode())
            if text_bytes >= num_bytes:
                break
    return RealText(documents, text_bytes)


def read_texts(path: Path, num_bytes: int | None = None) -> Iterator[str]:
    """Read the texts in about the first ``num_bytes`` of a file from :func:`write_real_text`."""
    taken = 0
    with path.open("rb") as stream:
        for line in stream:
            if num_bytes is not None and taken >= num_bytes:
                return
            taken += len(line)
            yield orjson.loads(line)["text"]


def train_tokenizer_on(path: Path, num_bytes: int, vocab_size: int, output: Path) -> None:
    """Write a byte-level BPE trained on about the first ``num_bytes`` of ``path``."""
    texts = read_texts(path, num_bytes)
    output.write_bytes(byte_level_bpe(texts, vocab_size, "<|endoftext|>"))


def _texts() -> Iterator[str]:
    seen: set[bytes] = set()
    paths = [path for path in list_files(_roots()).values() if _may_be_text(path)]
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if "\0" not in text and digest not in seen:
            seen.add(digest)
            yield text


def _roots() -> list[Path]:
    standard_library = Path(sysconfig.get_path("stdlib"))
    roots = [*default_roots(), standard_library, *map(Path, SYSTEM_ROOTS)]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _may_be_text(path: Path) -> bool:
    in_documentation = not path.suffix and "doc" in path.parts
    return (path.suffix in COMPILED | SCRIPTS | DOCUMENTATION or in_documentation) and (
        SMALLEST <= path.stat().st_size <= LARGEST
    )
