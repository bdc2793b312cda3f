"""Collect real text in named domains from the installed packages.

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from megatron_chameleon.artifacts.files import replacing, write_json
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError

MIN_DOMAINS = 6
SUMMARY_FILE = "gathered.json"

# Not pinned with the rest (pip comes with the interpreter), or this project itself.
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


@dataclasses.dataclass(frozen=True)
class InstalledFile:
    """A file and its path relative to site-packages, which is the document's source."""

    path: Path
    source: str


@dataclasses.dataclass(frozen=True)
class Document:
    """One line of a domain's file."""

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

    Each line is ``{"text": ..., "source": path in site-packages}``. No text is in two documents,
    whatever their domains. The same packages and options give the same bytes.

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
        found = collect(domain, by_domain[domain.name], options, seen)
        (gathered if has_enough(found, options) else too_small).append(found)
    if len(gathered) < min(MIN_DOMAINS, options.num_domains):
        raise UserError(_too_few(gathered, too_small, options))
    for found in gathered:
        write_domain(found, options.output_dir)
    write_json(options.output_dir / SUMMARY_FILE, summary(gathered, options))
    for name in earlier - {f"{found.domain.name}.jsonl" for found in gathered}:
        (options.output_dir / name).unlink(missing_ok=True)
    return gathered


def default_roots() -> tuple[Path, ...]:
    """The site-packages folders of this environment, once each."""
    paths = (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(paths))


def list_files(roots: Iterable[Path]) -> list[InstalledFile]:
    """Every regular file below ``roots``, sorted by its relative path; links are not followed.

    Raises:
        UserError: if a root is not a folder.
    """
    found: dict[str, InstalledFile] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--roots {root} is not a folder; give a site-packages folder")
        for path in _walk(root):
            source = path.relative_to(root).as_posix()
            found.setdefault(source, InstalledFile(path, source))
    return [found[source] for source in sorted(found)]


def assign_domains(
    files: Iterable[InstalledFile], domains: Iterable[DomainSource]
) -> dict[str, list[InstalledFile]]:
    """Domain name -> its files. A file goes to the first domain that matches it, or to none."""
    rules = [(d.name, _any_of(d.patterns), _any_of(d.excluded)) for d in domains]
    assigned: dict[str, list[InstalledFile]] = {name: [] for name, _patterns, _excluded in rules}
    for file in files:
        for name, patterns, excluded in rules:
            if patterns.match(file.source) and not excluded.match(file.source):
                assigned[name].append(file)
                break
    return assigned


def collect(
    domain: DomainSource,
    files: Iterable[InstalledFile],
    options: GatherOptions,
    seen: set[bytes],
) -> DomainText:
    """Documents for one domain, up to its share of bytes, sorted by source.

    Files are tried in the order of a hash of their path, so that a domain that is cut short still
    has a bit of every package. The texts' digests are added to ``seen``.
    """
    documents: list[Document] = []
    packages: Counter[str] = Counter()
    for file in sorted(files, key=lambda file: hashlib.sha256(file.source.encode()).digest()):
        text = read_document(file.path, domain.read, options)
        if text is None:
            continue
        size = len(text.encode())
        if packages.total() + size > options.max_bytes_per_domain:
            break
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        documents.append(Document(text, file.source))
        packages[_package(file.source)] += size
    documents.sort(key=lambda document: document.source)
    names = tuple(name for name, _size in packages.most_common())
    return DomainText(domain, tuple(documents), packages.total(), names)


def read_document(
    path: Path, read: Callable[[str], str | None], options: GatherOptions
) -> str | None:
    """The document in a file, or None if it is too short or not text (UTF-8 without NUL)."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    document = read(text)
    if document is None:
        return None
    document = cut_at_line(document.strip(), options.max_document_bytes)
    return document if len(document) >= options.min_document_characters else None


def cut_at_line(text: str, max_bytes: int) -> str:
    """The longest prefix of whole lines of ``text`` that fits; '' for one long line."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: encoded.rfind(b"\n", 0, max_bytes + 1) + 1].decode().rstrip()


def has_enough(found: DomainText, options: GatherOptions) -> bool:
    """Whether a domain is large enough for training and for held-out splits."""
    return (
        found.num_bytes >= options.min_bytes_per_domain
        and len(found.documents) >= options.min_documents_per_domain
    )


def write_domain(found: DomainText, folder: Path) -> None:
    """Write ``<domain>.jsonl``, one document a line."""
    with (
        replacing(folder / f"{found.domain.name}.jsonl") as temporary,
        temporary.open("wb") as stream,
    ):
        for document in found.documents:
            stream.write(
                orjson.dumps(dataclasses.asdict(document), option=orjson.OPT_APPEND_NEWLINE)
            )


def summary(gathered: Iterable[DomainText], options: GatherOptions) -> dict[str, Any]:
    """The contents of gathered.json: the domains in order of preference, and the limits."""
    limits = dataclasses.asdict(options)
    return {
        "domains": [
            {
                "name": found.domain.name,
                "what": found.domain.what,
                "file": f"{found.domain.name}.jsonl",
                "documents": len(found.documents),
                "bytes": found.num_bytes,
                "packages": found.packages,
            }
            for found in gathered
        ],
        "limits": {name: limits[name] for name in limits if name not in ("output_dir", "roots")},
    }


def format_table(gathered: Iterable[DomainText]) -> str:
    """The printed table: domain, documents, MB (10^6 bytes) and origin."""
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


def _walk(root: Path) -> Iterator[Path]:
    skipped = _any_of(SKIPPED_FOLDERS)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not skipped.match(name)]
        for name in names:
            path = Path(folder, name)
            if not skipped.match(name) and not path.is_symlink() and path.is_file():
                yield path


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for all patterns; for none, one that matches nothing."""
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or "(?!)")


def _package(source: str) -> str:
    """'numpy' for 'numpy/linalg/...' and for 'numpy-2.4.6.dist-info/METADATA'."""
    return source.split("/", 1)[0].split("-", 1)[0].removesuffix(".py")


def _earlier_files(folder: Path) -> set[str]:
    """Names that an earlier run wrote to ``folder``; they are replaced or removed.

    Raises:
        UserError: if the folder has other files, which someone may take for domains or may miss.
    """
    if not folder.exists():
        return set()
    if not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; give a folder")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return set()
    known = {f"{domain.name}.jsonl" for domain in DOMAINS} | {SUMMARY_FILE}
    # An interrupted run leaves some of the files, and perhaps a temporary one.
    ours = {name for name in names if name in known or _is_temporary(name, known)}
    if names - ours:
        other = sorted(names - ours)
        raise UserError(
            f"--output-dir {folder} has files of other origin ({other[0]}); "
            "use an empty or a new folder"
        )
    return names - {SUMMARY_FILE}


def _is_temporary(name: str, known: set[str]) -> bool:
    return name.endswith(".tmp") and any(name.startswith(f".{file}.") for file in known)


def _too_few(
    gathered: list[DomainText], too_small: list[DomainText], options: GatherOptions
) -> str:
    found = ", ".join(
        f"{text.domain.name} {text.num_bytes / 1e6:.1f} MB in {len(text.documents)} documents"
        for text in [*gathered, *too_small]
    )
    return (
        f"only {len(gathered)} domains have {options.min_bytes_per_domain / 1e6:g} MB and "
        f"{options.min_documents_per_domain} documents, {min(MIN_DOMAINS, options.num_domains)} "
        f"are needed; found: {found}; lower --min-bytes-per-domain or name more folders by --roots"
    )
