"""Collect real text in named domains from installed packages.

A quickstart needs text of clearly different kinds on a machine that has only the packages it just
installed. They contain source code in several languages, headers, stubs, tests, reference pages,
licences and tables of figures. Only site-packages is read, so that the same pinned
versions give the same text on every machine.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import hashlib
import inspect
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import orjson

from megatron_chameleon.artifacts.files import replacing, write_json
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError

MIN_DOMAINS = 6
SUMMARY_FILE = "gathered.json"

# Not pinned (pip comes with the interpreter), or this project.
SKIPPED_FOLDERS = ("__pycache__", "pip", "pip-*", "megatron_chameleon*", "__editable__*")


@dataclasses.dataclass(frozen=True)
class DomainSource:
    """The files of a domain: paths relative to site-packages, as shell patterns.

    In a pattern ``*`` also matches ``/``. ``read`` turns the text of a file into a document, or
    into None if it has none.
    """

    name: str
    what: str
    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    read: Callable[[str], str | None] = str


class Document(NamedTuple):
    """One line of a domain's file; ``source`` is the path relative to site-packages."""

    text: str
    source: str


@dataclasses.dataclass(frozen=True)
class DomainText:
    """The text of a domain. ``num_bytes`` counts the UTF-8 bytes of its documents."""

    domain: DomainSource
    documents: tuple[Document, ...]
    num_bytes: int
    packages: tuple[str, ...]


def docstrings(source: str) -> str | None:
    """The docstrings of a Python file, in the order of the file: a page of reference prose."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "lineno", 0), text)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False))
    ]
    return "\n\n".join(inspect.cleandoc(text) for _line, text in sorted(found)) or None


# Their docstrings are long reference pages. Their code is in no domain, so that no text is in two.
REFERENCE_PACKAGES = ("matplotlib", "mpmath", "networkx", "numpy", "scipy", "sympy")
HEADERS = (".h", ".hpp", ".hh", ".cuh", ".inl")
CUDA_HEADERS = ("triton/*", "nvidia/*")

# In order of preference: the first that have enough text are kept. A file belongs to the first
# domain it matches.
DOMAINS = (
    DomainSource(
        "test_suites",
        "Python tests that packages ship",
        ("*/test_*.py", "*/tests/*.py", "*/test/*.py", "*/testing/*.py"),
    ),
    DomainSource(
        "reference_prose",
        "docstrings of scientific libraries",
        tuple(f"{package}/*.py" for package in REFERENCE_PACKAGES),
        read=docstrings,
    ),
    DomainSource("python_source", "library modules in Python", ("*.py",)),
    DomainSource(
        "cpp_headers",
        "C++ headers of torch and others",
        tuple(f"*{ending}" for ending in HEADERS),
        excluded=CUDA_HEADERS,
    ),
    DomainSource("type_stubs", "Python type stubs", ("*.pyi",)),
    DomainSource(
        "licences_and_readmes",
        "licence texts, notices and package descriptions",
        (
            "*.dist-info/METADATA",
            "*.dist-info/*LICEN[CS]E*",
            "*.dist-info/licenses/*",
            "*/NOTICE*",
            "*.md",
            "*.rst",
        ),
    ),
    DomainSource(
        "number_tables",
        "font metrics, reference values, measurements",
        ("*.afm", "*.csv", "*.dat", "*.tab", "*.tsv"),
        # Random numbers: nothing to learn.
        excluded=("numpy/random/*",),
    ),
    DomainSource(
        "cuda_headers",
        "headers of CUDA's interfaces",
        tuple(f"{folder}{ending}" for folder in CUDA_HEADERS for ending in HEADERS),
    ),
    DomainSource("cython_source", "Cython modules", ("*.pyx", "*.pxd", "*.pxi", "*.pyx.in")),
    DomainSource("c_source", "sources in C and C++", ("*.c", "*.cc", "*.cpp", "*.cu")),
)


def gather_installed_text(options: GatherOptions) -> list[DomainText]:
    """Write ``<domain>.jsonl`` for the domains with enough text, and a summary.

    Each line is ``{"text": ..., "source": path in site-packages}``. No two documents have the same
    text, whatever their domains. The same packages and options give the same bytes.

    Raises:
        UserError: if fewer than six domains (or ``num_domains``) have enough text, or the folder
            holds files of other origin.
    """
    earlier = _earlier_files(options.output_dir)
    files = list_files(options.roots or default_roots())
    by_domain = assign_domains(files, DOMAINS)
    gathered: list[DomainText] = []
    too_small: list[DomainText] = []
    seen: set[bytes] = set()
    for domain in DOMAINS:
        if len(gathered) == options.num_domains:
            break
        paths = {source: files[source] for source in by_domain[domain.name]}
        found = collect(domain, paths, options, seen)
        has_enough = (
            found.num_bytes >= options.min_bytes_per_domain
            and len(found.documents) >= options.min_documents_per_domain
        )
        (gathered if has_enough else too_small).append(found)
    needed = min(MIN_DOMAINS, options.num_domains)
    if len(gathered) < needed:
        sizes = ", ".join(
            f"{text.domain.name} {text.num_bytes / 1e6:.1f} MB in {len(text.documents)} documents"
            for text in [*gathered, *too_small]
        )
        raise UserError(
            f"{len(gathered)} of the {needed} domains that are needed have "
            f"{options.min_bytes_per_domain / 1e6:g} MB and {options.min_documents_per_domain} "
            f"documents: {sizes}; lower --min-bytes-per-domain, or add folders with --roots"
        )
    for found in gathered:
        path = options.output_dir / f"{found.domain.name}.jsonl"
        with replacing(path) as temporary, temporary.open("wb") as stream:
            for document in found.documents:
                stream.write(orjson.dumps(document._asdict(), option=orjson.OPT_APPEND_NEWLINE))
    _write_summary(gathered, options)
    for name in earlier - {f"{found.domain.name}.jsonl" for found in gathered}:
        (options.output_dir / name).unlink(missing_ok=True)
    return gathered


def default_roots() -> tuple[Path, ...]:
    """The site-packages folders of this environment, once each."""
    paths = (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(paths))


def list_files(roots: Iterable[Path]) -> dict[str, Path]:
    """Relative path -> path of every regular file below ``roots``, sorted; no links are followed.

    Raises:
        UserError: if a root is not a folder.
    """
    found: dict[str, Path] = {}
    skipped = _any_of(SKIPPED_FOLDERS)
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--roots {root} is not a folder; pass a site-packages folder")
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if not skipped.match(name)]
            for path in (Path(folder, name) for name in names if not skipped.match(name)):
                if not path.is_symlink() and path.is_file():
                    found.setdefault(path.relative_to(root).as_posix(), path)
    return dict(sorted(found.items()))


def assign_domains(sources: Iterable[str], domains: Iterable[DomainSource]) -> dict[str, list[str]]:
    """Domain name -> relative paths; a file goes to the first domain that matches it, if any."""
    rules = [(d.name, _any_of(d.patterns), _any_of(d.excluded)) for d in domains]
    assigned: dict[str, list[str]] = {name: [] for name, _patterns, _excluded in rules}
    for source in sources:
        for name, patterns, excluded in rules:
            if patterns.match(source) and not excluded.match(source):
                assigned[name].append(source)
                break
    return assigned


def collect(
    domain: DomainSource, paths: dict[str, Path], options: GatherOptions, seen: set[bytes]
) -> DomainText:
    """Documents for one domain, up to its limit of bytes, sorted by source.

    Files are read in the order of a hash of their relative path, so that a domain that is truncated
    still has some text of every package. The texts' digests are added to ``seen``.
    """
    documents: list[Document] = []
    packages: Counter[str] = Counter()
    for source in sorted(paths, key=lambda source: hashlib.sha256(source.encode()).digest()):
        text = _read_document(paths[source], domain.read, options)
        if text is None:
            continue
        size = len(text.encode())
        if packages.total() + size > options.max_bytes_per_domain:
            break
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        documents.append(Document(text, source))
        # 'numpy' for 'numpy/linalg/...' and for 'numpy-2.4.6.dist-info/METADATA'
        packages[source.split("/", 1)[0].split("-", 1)[0].removesuffix(".py")] += size
    documents.sort(key=lambda document: document.source)
    names = tuple(name for name, _size in packages.most_common())
    return DomainText(domain, tuple(documents), packages.total(), names)


def _read_document(
    path: Path, read: Callable[[str], str | None], options: GatherOptions
) -> str | None:
    """The document in a file, or None if it is too short or not text (UTF-8 without NUL)."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    document = None if "\0" in text else read(text)
    if document is None:
        return None
    document = _truncated(document.strip(), options.max_document_bytes)
    return document if len(document) >= options.min_document_characters else None


def _truncated(text: str, max_bytes: int) -> str:
    """The longest prefix of whole lines of ``text`` that fits; '' for one long line."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: encoded.rfind(b"\n", 0, max_bytes + 1) + 1].decode().rstrip()


def _write_summary(gathered: Iterable[DomainText], options: GatherOptions) -> None:
    """Write gathered.json: the domains in order of preference, and the limits."""
    limits = dataclasses.asdict(options)
    del limits["output_dir"], limits["roots"]
    domains = [
        {
            "name": found.domain.name,
            "what": found.domain.what,
            "file": f"{found.domain.name}.jsonl",
            "documents": len(found.documents),
            "bytes": found.num_bytes,
            "packages": found.packages,
        }
        for found in gathered
    ]
    write_json(options.output_dir / SUMMARY_FILE, {"domains": domains, "limits": limits})


def format_table(gathered: Iterable[DomainText]) -> str:
    """Format the table: domain, documents, MB (10^6 bytes) and origin."""
    gathered = list(gathered)
    lines = [f"{'domain':22}{'documents':>10}{'MB':>7}  what, and where from"]
    for found in gathered:
        more = ", ..." if len(found.packages) > 3 else ""
        origin = f"{found.domain.what} ({', '.join(found.packages[:3])}{more})"
        size = f"{found.num_bytes / 1e6:.1f}"
        lines.append(f"{found.domain.name:22}{len(found.documents):>10,}{size:>7}  {origin}")
    documents = sum(len(found.documents) for found in gathered)
    total = sum(found.num_bytes for found in gathered) / 1e6
    lines.append(f"{'total':22}{documents:>10,}{total:>7.1f}")
    return "\n".join(lines)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for all patterns; for none, one that matches nothing."""
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or "(?!)")


def _earlier_files(folder: Path) -> set[str]:
    """Names that an earlier run wrote to ``folder``; they are replaced or removed.

    Raises:
        UserError: if the folder has other files, which could be mistaken for domains.
    """
    if not folder.exists():
        return set()
    if not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; pass a folder")
    names = {path.name for path in folder.iterdir()}
    known = {f"{domain.name}.jsonl" for domain in DOMAINS} | {SUMMARY_FILE}
    # A killed run may leave a temporary file.
    for name in sorted(names - known):
        if not (name.endswith(".tmp") and any(name.startswith(f".{file}.") for file in known)):
            raise UserError(
                f"--output-dir {folder} has files of other origin ({name}); pass a new folder"
            )
    return names - {SUMMARY_FILE}
