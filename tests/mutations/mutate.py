"""Mutations of files and JSON records, each a function of a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FileMutation = Callable[[Path, random.Random], None]

# Replacements for a JSON value. Strings beginning with RAW are written without quotes.
RAW = "\0raw:"
HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    "12",
    "",
    -1,
    0,
    1e308,
    10**18,
    [],
    {},
    [[]],
    {"": None},
    "../outside",
    "/etc/passwd",
    "\x1b[2J\x1b]0;title\x07",
    "\u202egnp.exe",
    "\ud800",
    "x" * 100_000,
    f"{RAW}NaN",
    f"{RAW}-Infinity",
    f"{RAW}1e400",
    RAW + "9" * 5000,
    RAW + "[" * 20_000 + "]" * 20_000,
)


def flip_bit(path: Path, rng: random.Random) -> None:
    """Flip one bit anywhere."""
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zero_range(path: Path, rng: random.Random) -> None:
    """Write zeros over up to 4096 bytes, as an unwritten block has."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(len(data), 1))
    end = min(start + rng.randint(1, 4096), len(data))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def scramble_range(path: Path, rng: random.Random) -> None:
    """Write random bytes over up to 64 bytes."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(len(data), 1))
    end = min(start + rng.randint(1, 64), len(data))
    data[start:end] = rng.randbytes(end - start)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """Cut the file off anywhere."""
    os.truncate(path, rng.randrange(max(path.stat().st_size, 1)))


def append(path: Path, rng: random.Random) -> None:
    """Add bytes at the end."""
    with path.open("ab") as stream:
        stream.write(rng.randbytes(rng.randint(1, 4096)))


def swap_blocks(path: Path, rng: random.Random) -> None:
    """Exchange two blocks of the same size, so that sums over all bytes do not change."""
    data = bytearray(path.read_bytes())
    size = max(min(512, len(data) // 4), 1)
    one, other = (rng.randrange(max(len(data) - size, 1)) for _ in range(2))
    first, second = bytes(data[one : one + size]), bytes(data[other : other + size])
    if abs(one - other) >= size:
        data[one : one + size], data[other : other + size] = second, first
    path.write_bytes(data)


def empty(path: Path, _rng: random.Random) -> None:
    """Leave a file of no bytes."""
    path.write_bytes(b"")


def delete(path: Path, _rng: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def become_folder(path: Path, _rng: random.Random) -> None:
    """Put a folder in the file's place."""
    path.unlink()
    path.mkdir()


def become_fifo(path: Path, _rng: random.Random) -> None:
    """Put a named pipe that nobody writes to in the file's place."""
    path.unlink()
    os.mkfifo(path)


def become_device(path: Path, _rng: random.Random) -> None:
    """Put a link to an endless device in the file's place."""
    path.unlink()
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path, _rng: random.Random) -> None:
    """Put a symbolic link to itself in the file's place."""
    path.unlink()
    path.symlink_to(path.name)


def copy_of_sibling(path: Path, rng: random.Random) -> None:
    """Replace the content by that of another file of the folder."""
    siblings = [p for p in sorted(path.parent.iterdir()) if p.is_file() and p != path]
    if siblings:
        shutil.copyfile(rng.choice(siblings), path)


def mutate_json(path: Path, rng: random.Random) -> None:
    """Change one value, key or item of a JSON file or of one line of a JSON-lines file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        whole, number = json.loads("\n".join(lines)), None
    except ValueError:
        number = rng.randrange(len(lines))
        whole = json.loads(lines[number])
    places = list(_places(whole))
    holder, key = rng.choice(places) if places else (None, None)
    if holder is None:
        whole = rng.choice(HOSTILE_VALUES)
    elif rng.random() < 0.25:
        del holder[key]
    elif rng.random() < 0.15 and isinstance(holder, dict):
        holder[rng.choice(("", "extra", "\x1b[31m", "kind"))] = rng.choice(HOSTILE_VALUES)
    else:
        holder[key] = rng.choice(HOSTILE_VALUES)
    text = _dump(whole)
    if number is not None:
        lines[number] = text
        text = "\n".join(lines)
    path.write_text(text + "\n", encoding="utf-8", errors="surrogatepass")


def _places(value: Any) -> Any:
    """Every (container, key) in ``value``; shallow ones come as often as deep ones."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _dump(value: Any) -> str:
    text = json.dumps(value)
    start = json.dumps(RAW)[1:-1]
    while (at := text.find(f'"{start}')) >= 0:
        end = text.index('"', at + 1)
        text = text[:at] + text[at + 1 + len(start) : end] + text[end + 1 :]
    return text


FILE_MUTATIONS: tuple[FileMutation, ...] = (
    flip_bit,
    flip_bit,
    flip_bit,
    zero_range,
    scramble_range,
    scramble_range,
    truncate,
    append,
    swap_blocks,
    empty,
    delete,
    become_folder,
    become_fifo,
    become_device,
    link_to_itself,
    copy_of_sibling,
)


def mutate(path: Path, rng: random.Random) -> str:
    """Mutate the file at ``path`` in place; returns the mutation's name.

    JSON files are mutated in their structure two times out of three.
    """
    is_json = path.suffix in (".json", ".jsonl") and rng.random() < 2 / 3
    mutation = mutate_json if is_json else rng.choice(FILE_MUTATIONS)
    mutation(path, rng)
    return mutation.__name__
