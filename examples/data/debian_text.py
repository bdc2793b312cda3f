#!/usr/bin/env python3
"""Collect text in named domains from Debian packages: registers of English, or program code.

The packages are downloaded with ``apt-get download``, which needs neither root nor an installation,
and unpacked with ``dpkg-deb -x``. The readers below turn their files into documents.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import lzma
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import tyro

from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.cli import Tool
from megatron_chameleon.corpus.installed_text import (
    PackageDomain,
    format_table,
    gather_text,
    list_files,
    plain,
)
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError

# Lengths of the documents into which books, dictionaries and collections of sayings are divided.
PAGE_CHARACTERS = 6000
# Files with longer lines are minified, or tables.
MAX_LINE = 1000
_LICENCE = re.compile(r"copyright|licen[cs]e|redistribut|all rights reserved|spdx-", re.IGNORECASE)
# A comment at the beginning of a file: one block, or consecutive lines.
_FIRST_COMMENT = re.compile(
    r"\s*(?:#!.*\n)?\s*(?:/\*.*?\*/|(?:(?://|#|--)[^\n]*(?:\n|\Z))+)", re.DOTALL
)


def pages(text: str) -> Iterator[str]:
    """Divide ``text`` at empty lines into documents; paragraphs about licences are left out."""
    page: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not _LICENCE.search(paragraph):
            page.append(paragraph)
        if sum(map(len, page)) >= PAGE_CHARACTERS:
            yield "\n\n".join(page)
            page = []
    yield "\n\n".join(page)


def text_pages(content: bytes) -> Iterator[str]:
    """Divide a text file into :func:`pages`."""
    for text in plain(content):
        yield from pages(text)


def sayings(content: bytes) -> Iterator[str]:
    """Pages of a file of fortune(6), where a line with ``%`` ends each saying."""
    for text in plain(content):
        yield from pages(text.replace("\n%\n", "\n\n"))


def program(content: bytes) -> Iterator[str]:
    """Return a source file without the comments about its licence that it begins with.

    Minified and generated files, which have very long lines, are left out.
    """
    for text in plain(content):
        while (comment := _FIRST_COMMENT.match(text)) and _LICENCE.search(comment[0]):
            text = text[comment.end() :]
        if max(map(len, text.splitlines()), default=0) <= MAX_LINE:
            yield text


def archived_programs(content: bytes) -> Iterator[str]:
    """Read every .c and .h file of a tar archive as a :func:`program`."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".c", ".h")):
                stream = archive.extractfile(member)
                assert stream is not None
                yield from program(stream.read())


def zlib_blocks(content: bytes, header: int = 0) -> Iterator[bytes]:
    """Decompress consecutive zlib streams; ``header`` bytes before each of them are skipped.

    Without headers, streams may be padded with zeros.

    Raises:
        zlib.error: for a damaged stream.
        EOFError: if the last stream is incomplete.
    """
    while len(content) > header:
        block = zlib.decompressobj()
        yield block.decompress(content[header:])
        if not block.eof:
            raise EOFError("a stream is incomplete")
        content = block.unused_data if header else block.unused_data.lstrip(b"\0")


def r_strings(content: bytes) -> Iterator[str]:
    """Pages of the character vectors in a database of R objects (.rdb).

    Each object is a zlib stream after its length (4 bytes). In R's serialization format (R
    Internals, section 1.8), a string is a flag word of type 9, its length (4 bytes, big-endian),
    and its bytes.
    """
    for block in zlib_blocks(content, header=4):
        lines: list[str] = []
        for found in re.finditer(rb"\x00[\x00-\x07][\x00-\xff]\x09(?=\x00)", block):
            start = found.end() + 4
            size = int.from_bytes(block[found.end() : start], "big")
            lines.append(block[start : start + size].decode("utf-8", "replace"))
        yield from pages("\n".join(lines))


def bible_books(content: bytes) -> Iterator[str]:
    """Pages of a module of SWORD with compressed text (.bzz), without markup and notes."""
    for block in zlib_blocks(content):
        text = re.sub(r"<note\b.*?</note>", "", block.decode("utf-8", "replace"), flags=re.DOTALL)
        text = re.sub(r"<(?:milestone|lb|l|lg|p|chapter|title)\b[^>]*>", "\n", text)
        text = re.sub(r"<[^>]*>|\0", "", text)
        # Verses are not separated: end a line after each sentence of a verse.
        yield from pages(re.sub(r"(?<=[.:;?!])(?=[A-Z¶])", "\n", text).replace("¶", "\n\n"))


# Macros whose arguments are printed, alternately in two fonts and thus without spaces, or in one.
_TWO_FONTS = {".BR", ".RB", ".BI", ".IB", ".IR", ".RI"}
_ONE_FONT = {".B", ".I", ".SM", ".SB", ".SH", ".SS", ".UR", ".MT", ".IP", ".TP", ".R"}
_ESCAPES = {
    r"\-": "-", r"\e": "\\", r"\(aq": "'", r"\(dq": '"', r"\(bu": "*", r"\(em": "--", r"\(en": "-",
    r"\(co": "(C)", r"\(ti": "~", r"\(ha": "^", r"\(rs": "\\", r"\(mi": "-", r"\(+-": "+-",
    r"\(<=": "<=", r"\(>=": ">=", r"\(mu": "x", r"\ ": " ", r"\~": " ", r"\0": " ", r"\.": ".",
}  # fmt: skip
_ESCAPE = re.compile(
    r'\\(?:f(?:\[\w*\]|\(..|.)|s[-+]?\d+|\*(?:\[\w*\]|\(..|.)|"[^\n]*|\((?:..)|\[[^\]]*\]|.)'
)


def manual_page(content: bytes) -> Iterator[str]:
    """Return the text of a manual page, without the commands of roff and without comments."""
    for source in plain(content):
        lines: list[str] = []
        for line in source.splitlines():
            macro, _, rest = line.partition(" ")
            if line.startswith((".", "'")):
                arguments = re.findall(r'"([^"]*)"|(\S+)', rest)
                words = [quoted or word for quoted, word in arguments]
                if macro == ".so":  # another name of a page
                    return
                if macro in (".SH", ".SS", ".PP", ".P", ".LP", ".TP", ".IP"):
                    lines.append("")
                if macro in _TWO_FONTS:
                    lines.append("".join(words))
                elif macro in _ONE_FONT:
                    lines.append(" ".join(words[:1] if macro == ".IP" else words))
            else:
                lines.append(line)
        text = _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[0], ""), "\n".join(lines))
        text = re.split(r"\n(?:COLOPHON|COPYRIGHT|AUTHORS?)\n", text)[0]
        yield re.sub(r"\n{3,}", "\n\n", text)


@dataclasses.dataclass(frozen=True)
class DebianDomain(PackageDomain):
    """A domain whose text comes from the Debian packages ``packages``, each as NAME=VERSION."""

    packages: tuple[str, ...] = ()

    def documents(self, source: str, path: Path) -> Iterator[str]:
        """Read the documents of a file, which is decompressed if its name ends in .gz or .dz.

        Raises:
            UserError: if the file is a damaged archive.
        """
        content = path.read_bytes()
        try:
            if path.suffix in (".gz", ".dz"):
                content = gzip.decompress(content)
            yield from self.read(content)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
            reason = " ".join(str(error).split())
            package = shlex.quote(str(path.parents[source.count("/") - 1]))
            raise UserError(
                f"{path} is damaged ({reason}); delete the package from the cache: rm -r "
                f"{package}*, and run the command again"
            ) from error

    def package(self, source: str) -> str:
        """NAME_VERSION of the package with this path."""
        return source.split("/", 1)[0]


def _domain(
    name: str,
    what: str,
    packages: str,
    patterns: str,
    read: Callable[[bytes], Iterable[str]],
    excluded: str = "",
) -> DebianDomain:
    """Describe a domain of packages NAME=VERSION, and the files that are read in all of them."""
    names = [package.partition("=")[0] for package in packages.split()]
    in_packages = " ".join(f"{name}_{pattern}" for name in names for pattern in patterns.split())
    return DebianDomain(name, what, in_packages, excluded, read, tuple(packages.split()))


# Versions of Debian 12. A version that the archive no longer has is replaced by its successor.
COLLECTIONS: Mapping[str, tuple[DebianDomain, ...]] = {
    "registers": (
        _domain(
            "novels", "the six novels of Jane Austen",
            "r-cran-janeaustenr=1.0.0-1", "*.rdb", r_strings,
        ),
        _domain(
            "scripture", "the King James Bible", "sword-text-kjv=14.3-1", "*.bzz", bible_books
        ),
        _domain(
            "dictionary", "entries of the dictionaries GCIDE and FOLDOC",
            "dict-gcide=0.48.5+nmu2 dict-foldoc=20230119-1", "*.dict.dz", text_pages,
        ),
        _domain(
            "sayings", "aphorisms, jokes and quotations of fortune, and the Jargon File",
            "fortunes=1:1.99.1-7.3 fortunes-min=1:1.99.1-7.3 jargon-text=4.4.7-4.1",
            "*/games/fortunes/* */jargon.txt.gz", sayings, "*.dat",
        ),
        _domain(
            "essays", "political essays: An Anarchist FAQ",
            "anarchism=15.3-3", "*/markdown/*.md.gz", text_pages,
        ),
        _domain(
            "manual_pages", "manual pages of Linux and its C library",
            "manpages=6.03-2 manpages-dev=6.03-2", "*/man/man*/*.gz", manual_page,
        ),
        _domain(
            "programming_manual", "the documentation of Python",
            "python3.11-doc=3.11.2-6+deb12u9", "*/_sources/*.rst.txt", text_pages,
            "*/whatsnew/*",
        ),
        _domain(
            "system_guides", "policies and guides of Debian, and the documentation of Git",
            "debian-policy=4.6.2.0 developers-reference=12.18 debian-reference-en=2.100 "
            "maint-guide=1.2.53 git-doc=1:2.39.5-0+deb12u3",
            "*/policy.txt.gz */*-policy.txt.gz */fhs-3.0.txt.gz */debconf_specification.txt.gz "
            "*/developers-reference.txt.gz */debian-reference.en.txt.gz */maint-guide.en.txt.gz "
            "*/git-doc/*.txt",
            text_pages, "*/RelNotes/*",
        ),
    ),
    "code": (
        _domain(
            "c", "the GNU C library", "glibc-source=2.36-9+deb12u14", "*.tar.xz", archived_programs
        ),
        _domain(
            "cpp", "the headers of Eigen and CGAL",
            "libeigen3-dev=3.4.0-4 libcgal-dev=5.5.1-2",
            "*.h",
            program,
        ),
        _domain(
            "go", "Go's x/net, x/tools and x/crypto, and gRPC",
            "golang-golang-x-net-dev=1:0.7.0+dfsg-1 golang-golang-x-tools-dev=1:0.5.0+ds-1 "
            "golang-golang-x-crypto-dev=1:0.4.0-1 golang-google-grpc-dev=1.33.3-2",
            "*.go", program, "*/testdata/* *.pb.go */tables*.go",
        ),
        _domain(
            "javascript", "npm, ESLint, undici, Express, Acorn and Babel",
            "npm=9.2.0~ds1-1 eslint=6.4.0~dfsg+~6.1.9-7 "
            "node-undici=5.15.0+dfsg1+~cs20.10.9.3-1+deb12u4 node-express=4.18.2+~4.17.14-1 "
            "node-acorn=8.8.1+ds+~cs25.17.7-2 node-babel7=7.20.15+ds1+~cs214.269.168-3+deb12u2",
            "*.js", program, "*.min.js",
        ),
        _domain(
            "perl", "Perl's modules, Mojolicious, Moose, DBIx::Class, PPI and Perl::Critic",
            "perl-modules-5.36=5.36.0-7+deb12u4 libmojolicious-perl=9.31+dfsg-1 "
            "libmoose-perl=2.2203-1 libdbix-class-perl=0.082843-1 libperl-critic-perl=1.148-1 "
            "libppi-perl=1.276-1",
            "*.pm", program, "*/unicore/* */Unicode/Collate/*",
        ),
        _domain(
            "python", "Django, SQLAlchemy, NetworkX, Twisted and Mercurial",
            "python3-django=3:3.2.25-0+deb12u7 python3-sqlalchemy=1.4.46+ds1-1 "
            "python3-networkx=2.8.8-1 python3-twisted=22.4.0-4+deb12u1 "
            "mercurial-common=6.3.2-1+deb12u1",
            "*.py", program, "*/locale/*",
        ),
        _domain(
            "ruby", "Ruby's library, RuboCop, Sequel and parts of Rails",
            "libruby3.1=3.1.7+really3.1.2-0+deb12u1 rubocop=1.39.0+dfsg-1 ruby-sequel=5.63.0-1 "
            "ruby-activerecord=2:6.1.7.10+dfsg-1~deb12u4 "
            "ruby-actionpack=2:6.1.7.10+dfsg-1~deb12u4 "
            "ruby-activesupport=2:6.1.7.10+dfsg-1~deb12u4",
            "*.rb", program,
        ),
        _domain(
            "rust", "tokio, syn, regex, serde, clap, rayon, nix, hyper, image, rustls and chrono",
            "librust-tokio-dev=1.24.2-1 librust-syn-dev=1.0.107-1 librust-regex-dev=1.7.1-1 "
            "librust-regex-syntax-dev=0.6.28-1 librust-serde-dev=1.0.152-2 "
            "librust-clap-dev=4.0.32-1 librust-rayon-dev=1.6.1-1 librust-nix-dev=0.26.1-3 "
            "librust-hyper-dev=0.14.19-1 librust-image-dev=0.24.3-1 librust-rustls-dev=0.20.8-4 "
            "librust-chrono-dev=0.4.23-2",
            "*.rs", program,
        ),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DebianOptions(GatherOptions):
    """Collect real text in named domains from Debian packages, which 'apt-get download' fetches."""

    roots: tyro.conf.Suppress[tuple[Path, ...]] = ()
    collection: Literal["registers", "code"] = "registers"
    """registers: English in eight registers (novels, scripture, dictionaries, manuals, ...). code:
    eight programming languages."""
    package_cache: Path = Path("~/.cache/megatron_chameleon/debian")
    """Folder that keeps the Debian packages, about 400 MB with their unpacked files."""


def main(options: DebianOptions) -> None:
    """Collect text and print the table of domains."""
    domains = COLLECTIONS[options.collection]
    files = debian_files(domains, options.package_cache.expanduser())
    print(format_table(gather_text(options, options.collection, domains, files)))
    print(f"written to {options.output_dir}")


def debian_files(domains: Iterable[DebianDomain], cache: Path) -> dict[str, Path]:
    """Download and unpack the packages of ``domains``; return the paths of their files.

    Keys are relative paths that begin with NAME_VERSION of the package. ``cache`` keeps the .deb
    files; a package that it holds, in any version, is not downloaded again.

    Raises:
        UserError: if apt-get or dpkg-deb is missing, or if a package cannot be downloaded.
    """
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]:
        raise UserError(
            f"{missing[0]} not found: this collection consists of Debian packages; run the command "
            "on Debian or Ubuntu, or in one of their containers"
        )
    files: dict[str, Path] = {}
    for package in dict.fromkeys(package for domain in domains for package in domain.packages):
        deb = _downloaded(package, cache)
        folder = cache / deb.stem.rpartition("_")[0]  # without the architecture
        if not folder.exists():
            unpacked = cache / f".{folder.name}.tmp"
            _call(["dpkg-deb", "-x", deb.name, unpacked.name], cache)
            unpacked.rename(folder)
        found = list_files([folder])
        files |= {f"{folder.name}/{source}": path for source, path in found.items()}
    return files


def _downloaded(package: str, cache: Path) -> Path:
    """Return the .deb file of NAME=VERSION in ``cache``; download it if it is missing.

    apt-get writes an unfinished file under its final name, so it writes to another folder.
    """
    name, unfinished = package.partition("=")[0], cache / ".download"
    with writing(cache):
        unfinished.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(cache.glob(f"{name}_*.deb"))):
        failed = ""
        # Root downloads as the user _apt, who may not write into the folder.
        options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        for version in (package, name):
            failed = _call(["apt-get", *options, "download", version], unfinished, may_fail=True)
            if not failed:
                break
        else:
            raise UserError(
                f"cannot download the Debian package {name} ({failed}); run 'apt-get update' as "
                f"root, or put its .deb file into {cache}"
            )
        found = [deb.rename(cache / deb.name) for deb in sorted(unfinished.glob(f"{name}_*.deb"))]
    return found[-1]


def _call(command: list[str], folder: Path, may_fail: bool = False) -> str:
    """Run ``command`` in ``folder``; return its last line of errors if it fails.

    Raises:
        UserError: if it fails and ``may_fail`` is not set.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if not may_fail:
        raise UserError(f"{' '.join(command)} failed: {error}")
    return error


if __name__ == "__main__":
    Tool(main, DebianOptions).run()
