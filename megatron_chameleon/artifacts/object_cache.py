"""Local copies of files in object storage, which later runs reuse.

The name of a copy depends on URL, size, modification time and ETag of the file, so that a file that
has changed gets another copy. Copies are never removed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

from megatron_chameleon.artifacts.files import replacing, sha256_of_json, writing
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import FileState, file_state, open_file, reading

HINT = "correct the address"
_BLOCK = 1 << 23
# Of names of copies: hexadecimal digits of the key, and the end of the file's own name.
_KEY_CHARACTERS, _NAME_CHARACTERS = 32, 50


def cache_folder() -> Path:
    """The default folder of local copies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron_chameleon"


def cache_entry(url: str, state: FileState, cache: Path | None) -> Path:
    """Path of the copy of the file at ``url`` in the folder ``cache``, or in the default folder."""
    key = sha256_of_json([url, *dataclasses.astuple(state)])[:_KEY_CHARACTERS]
    name = url.rpartition("/")[2][-_NAME_CHARACTERS:]
    return (cache or cache_folder()) / f"{key}-{name}"


def cached_file(url: str, cache: Path | None = None) -> Path:
    """Return the path of a local copy of the file at ``url``; download it if there is none.

    Raises:
        UserError: if the file cannot be read, or the copy cannot be written.
    """
    with reading(url, HINT):
        state = file_state(url)
    entry = cache_entry(url, state, cache)
    lock = entry.with_name(f"{entry.name}.lock")
    with writing(entry):
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("w")
    # Of several ranks, one downloads the file while the others wait.
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not entry.exists():
            for killed in entry.parent.glob(f".{entry.name[:_KEY_CHARACTERS]}*.tmp"):
                killed.unlink()  # left by a process that was killed during the download
            with replacing(entry) as temporary, temporary.open("wb") as copy:
                with reading(url, HINT):
                    source = open_file(url)
                with source:
                    while True:
                        with reading(url, HINT):
                            block = source.read(_BLOCK)
                        if not block:
                            break
                        copy.write(block)
                if copy.tell() != state.bytes:
                    raise UserError(f"{url} has changed while it was read; run again")
    return entry
