"""Mutate files and JSON records by a random generator."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

# Replacements for a JSON value. Strings beginning with RAW are written without quotes.
RAW = "\0raw:"
HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, "12", "", -1, 0, 1e308, 10**18, [], {}, [[]], {"": None}),
    *("../outside", "/etc/passwd", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "\ud800"),
    *("x" * 100_000, f"{RAW}NaN", f"{RAW}-Infinity", f"{RAW}1e400", RAW + "9" * 5000),
    RAW + "[" * 20_000 + "]" * 20_000,
)


def damaged(data: bytes, damage: str, rng: random.Random) -> bytes:
    """Return ``data`` with the given kind of damage at a random position."""
    changed = bytearray(data)
    start = rng.randrange(max(len(data), 1))
    if damage == "flip_bit" and data:
        changed[start] ^= 1 << rng.randrange(8)
    elif damage == "zero_range":  # like a disk block that was never written
        end = min(start + rng.randint(1, 4096), len(data))
        changed[start:end] = bytes(end - start)
    elif damage == "scramble_range":
        end = min(start + rng.randint(1, 64), len(data))
        changed[start:end] = rng.randbytes(end - start)
    elif damage == "truncate":
        del changed[start:]
    elif damage == "append":
        changed += rng.randbytes(rng.randint(1, 4096))
    elif damage == "swap_blocks":  # a sum of bytes would not detect this
        size = max(min(512, len(data) // 4), 1)
        one, other = (rng.randrange(max(len(data) - size, 1)) for _ in range(2))
        if abs(one - other) >= size:
            changed[one : one + size] = data[other : other + size]
            changed[other : other + size] = data[one : one + size]
    elif damage == "empty":
        changed.clear()
    return bytes(changed)


def replace_file(path: Path, kind: str) -> None:
    """Delete the file at ``path``, or replace it by something other than a regular file."""
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path.name)


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
    """Every (container, key) in ``value``, at any depth."""
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


DAMAGES = (*["flip_bit"] * 3, "zero_range", *["scramble_range"] * 2, "truncate", "append")
DAMAGES += ("swap_blocks", "empty")
REPLACEMENTS = ("nothing", "folder", "fifo", "device", "link to itself")
SIBLING = "copy of sibling"


def mutate(path: Path, rng: random.Random) -> str:
    """Mutate the file at ``path`` in place; returns the mutation's name.

    With probability 2/3, the structure of a JSON file is mutated instead of its bytes.
    """
    if path.suffix in (".json", ".jsonl") and rng.random() < 2 / 3:
        mutate_json(path, rng)
        return "json"
    mutation = rng.choice((*DAMAGES, *REPLACEMENTS, SIBLING))
    if mutation in DAMAGES:
        path.write_bytes(damaged(path.read_bytes(), mutation, rng))
    elif mutation in REPLACEMENTS:
        replace_file(path, mutation)
    elif siblings := [p for p in sorted(path.parent.iterdir()) if p.is_file() and p != path]:
        shutil.copyfile(rng.choice(siblings), path)
    return mutation
