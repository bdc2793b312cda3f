"""Text of Debian packages: downloaded packages are unpacked, and their files read as documents."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
import zlib

import pytest

from examples.data import debian_text
from megatron_chameleon.errors import UserError

MANUAL_PAGE = r"""'\" t
.\" Copyright 1993 Somebody
.TH scandir 3 2023-02-05 "Linux man-pages"
.SH NAME
scandir, alphasort \- scan \fIa directory\fP
.SH DESCRIPTION
.TP
.BR scandir ( 3 ),
with
.I filter
or \(aqname\(aq.
.B "end  here"
.SH COPYRIGHT
Somebody.
"""


def test_manual_pages_lose_their_roff():
    text = "".join(debian_text.manual_page(MANUAL_PAGE.encode()))
    assert " ".join(text.split()) == (
        "NAME scandir, alphasort - scan a directory DESCRIPTION scandir(3), with filter or "
        "'name'. end here"
    )
    assert not list(debian_text.manual_page(b".so man3/scandir.3\n"))


def test_programs_lose_their_licence_only():
    def read(text):
        return list(debian_text.program(text.encode()))

    code = "// Adds.\nint add;\n// Copyright of a variable\n"
    assert read("/* Copyright 1\n * License\n */\n\n// SPDX-License: x\n\n" + code) == ["\n" + code]
    assert read("#!/bin/sh\n# Licence\nx=1\n") == ["x=1\n"]
    assert read(code) == [code]
    assert read("x" * 2000) == []
    assert read("\0") == []


def test_compressed_containers_are_read():
    strings = b"".join(
        b"\x00\x04\x00\x09" + len(line).to_bytes(4, "big") + line
        for line in (b"It was", b"", b"the best")
    )
    packed = zlib.compress(b"X\n" + b"\0\0\0\x10" + strings)
    database = 2 * (len(strings).to_bytes(4, "big") + packed)
    assert list(debian_text.r_strings(database)) == ["It was\n\nthe best"] * 2
    books = (b"<title>A</title>In <w lemma='x'>the</w><note>no</note> end.", b"<p/>So.")
    module = b"".join(zlib.compress(book) + bytes(1024) for book in books)
    read = ["".join(text.split()) for text in debian_text.bible_books(module)]
    assert read == ["AIntheend.", "So."]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name in ("a.c", "b.h", "c.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(f"{name}"[:3].encode()))
    assert list(debian_text.archived_programs(stream.getvalue())) == ["a.c", "b.h"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs Debian's dpkg-deb")
def test_packages_are_gathered_from_their_files(tmp_path, monkeypatch):
    cache, names = tmp_path / "cache", [f"part{number}" for number in range(6)]
    cache.mkdir()
    for name in names:
        folder = tmp_path / name
        for path in ("DEBIAN", "usr/share"):
            (folder / path).mkdir(parents=True)
        control = (
            f"Package: {name}\nVersion: 1:2-1\nArchitecture: all\nMaintainer: x\nDescription: x"
        )
        (folder / "DEBIAN/control").write_text(control + "\n")
        rng = random.Random(name)
        for number in range(3):
            text = "\n\n".join(str(rng.random()) * 3 for _ in range(300))
            (folder / f"usr/share/{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
        subprocess.run(
            ["dpkg-deb", "-b", str(folder), str(cache / f"{name}_1%3a2-1_all.deb")],
            check=True,
            capture_output=True,
        )
    domains = tuple(
        debian_text._domain(name, "text", f"{name}=1:1-1", "*.txt.gz", debian_text.text_pages)
        for name in names
    )
    monkeypatch.setattr(debian_text, "COLLECTIONS", {"code": domains})
    options = debian_text.DebianOptions(
        tmp_path / "text",
        collection="code",
        package_cache=cache,
        min_bytes_per_domain=10_000,
        min_documents_per_domain=3,
    )
    debian_text.main(options)
    files = {path.name: path.read_bytes() for path in options.output_dir.glob("*.jsonl")}
    assert [content.count(b"\n") for content in files.values()] == [9] * 6
    summary = json.loads((tmp_path / "text/gathered.json").read_text())
    assert summary["domains"][0]["packages"] == ["part0_1%3a2-1"]
    # Unpacked files are read again.
    for deb in cache.glob("*.deb"):
        deb.write_bytes(b"")
    debian_text.main(options)
    assert {path.name: path.read_bytes() for path in options.output_dir.glob("*.jsonl")} == files
    # A damaged archive is reported with its place in the cache.
    damaged = cache / "part3_1%3a2-1/usr/share/1.txt.gz"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-9])
    with pytest.raises(UserError, match=rf"{damaged} is damaged .* rm -r {cache}/part3_1%3a2-1\*"):
        debian_text.main(options)
    damaged.write_bytes(content)
    # A download that fails leaves no package.
    (cache / "part3_1%3a2-1_all.deb").unlink()
    apt = tmp_path / "bin/apt-get"
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\necho x > part3_1%3a2-1_all.deb\necho gone >&2\nexit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apt.parent}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"package part3 \(gone\)"):
        debian_text.main(options)
    assert not list(cache.glob("part3_*.deb"))
