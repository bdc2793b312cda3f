"""Collect real text in named domains from the installed Python packages.

A quickstart needs text of clearly different kinds, and the packages that it has just installed may
be the only text on the machine. Packages contain source code in several languages, headers, stubs,
tests, reference pages, licences and tables of figures. Only site-packages is read, so that the same
pinned versions give the same text on every machine.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from megatron_chameleon.artifacts.files import replacing, write_json, writing
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError

MIN_DOMAINS = 6
SUMMARY_FILE = "gathered.json"


def plain(content: bytes) -> list[str]:
    """Return the text of a file as one document; no document if it is not text in UTF-8."""
    if b"\0" in content:
        return []
    try:
        return [content.decode()]
    except UnicodeDecodeError:
        return []


@dataclasses.dataclass(frozen=True)
class PackageDomain:
    """A domain whose text comes from files of packages.

    ``patterns`` and ``excluded`` are shell patterns, separated by spaces, of relative paths; in a
    pattern ``*`` also matches ``/``. ``read`` returns the documents in the content of a file.
    """

    name: str
    what: str
    patterns: str
    excluded: str = ""
    read: Callable[[bytes], Iterable[str]] = plain

    def documents(self, source: str, path: Path) -> Iterator[str]:
        """Read the documents of the file ``path``, whose relative path is ``source``."""
        yield from self.read(path.read_bytes())

    def package(self, source: str) -> str:
        """Name of the package with this path: numpy for numpy-2.4.6.dist-info/METADATA."""
        return source.split("/", 1)[0].split("-", 1)[0].removesuffix(".py")


@dataclasses.dataclass(frozen=True)
class GatheredDomain:
    """The text of a domain: documents by the relative path of their file.

    ``num_bytes`` counts the UTF-8 bytes of the documents; ``packages`` names the packages that they
    come from, largest first.
    """

    domain: PackageDomain
    documents: dict[str, str]
    num_bytes: int
    packages: tuple[str, ...]


def docstrings(content: bytes) -> list[str]:
    """Join the docstrings of a Python file into a page of prose."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "lineno", 0), text)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False))
    ]
    return ["\n\n".join(inspect.cleandoc(text) for _line, text in sorted(found))]


# Excluded: pip, whose version is not pinned since it comes with the interpreter, and this project.
_SKIPPED = "__pycache__ pip pip-* megatron_chameleon* __editable__*"
# Libraries whose docstrings are long reference pages. Their code is left out, so that no text is in
# two domains.
_REFERENCE = "matplotlib/*.py mpmath/*.py networkx/*.py numpy/*.py scipy/*.py sympy/*.py"
_HEADERS = (".h", ".hpp", ".hh", ".cuh", ".inl")
_CUDA = ("triton/*", "nvidia/*")
_CPP_HEADERS = " ".join(f"*{ending}" for ending in _HEADERS)
_CUDA_HEADERS = " ".join(f"{folder}{ending}" for folder in _CUDA for ending in _HEADERS)
_LICENCES = (
    "*.dist-info/METADATA *.dist-info/*LICEN[CS]E* *.dist-info/licenses/* */NOTICE* *.md *.rst"
)
_TESTS = "*/test_*.py */tests/*.py */test/*.py */testing/*.py"
_TABLES = "*.afm *.csv *.dat *.tab *.tsv"
_RANDOM_NUMBERS = "numpy/random/*"
# Domains in order of preference: the first domains with enough text are kept. A file belongs to the
# first domain that matches it.
DOMAINS = (
    PackageDomain("test_suites", "Python tests that packages ship", _TESTS),
    PackageDomain(
        "reference_prose", "docstrings of scientific libraries", _REFERENCE, read=docstrings
    ),
    PackageDomain("python_source", "library modules in Python", "*.py"),
    PackageDomain("cpp_headers", "C++ headers of libraries", _CPP_HEADERS, " ".join(_CUDA)),
    PackageDomain("type_stubs", "Python type stubs", "*.pyi"),
    PackageDomain(
        "licences_and_readmes", "licence texts, notices and package descriptions", _LICENCES
    ),
    PackageDomain(
        "number_tables", "font metrics, reference values, measurements", _TABLES, _RANDOM_NUMBERS
    ),
    PackageDomain("cuda_headers", "headers of CUDA's interfaces", _CUDA_HEADERS),
    PackageDomain("cython_source", "Cython modules", "*.pyx *.pxd *.pxi *.pyx.in"),
    PackageDomain("c_source", "sources in C and C++", "*.c *.cc *.cpp *.cu"),
)


def gather_installed_text(options: GatherOptions) -> list[GatheredDomain]:
    """Gather the text of the folders ``options.roots``; default: this environment's site-packages.

    Raises:
        UserError: see :func:`gather_text`, and if a root is not a folder.
    """
    return gather_text(options, "installed", DOMAINS, list_files(options.roots or default_roots()))


def gather_text(
    options: GatherOptions,
    collection: str,
    domains: Sequence[PackageDomain],
    files: Mapping[str, Path],
) -> list[GatheredDomain]:
    """Write ``<domain>.jsonl`` for the domains with enough text, and a summary.

    Each line is ``{"text": ..., "source": path of the file}``. No two documents have the same
    text, even in different domains. The same files and options give the same bytes.

    Args:
        options: output folder and limits.
        collection: name of the domains, recorded in the summary.
        domains: in order of preference.
        files: relative path -> path.

    Raises:
        UserError: if fewer than min(6, ``num_domains``) domains have enough text, or the folder
            holds a file that this function does not write.
    """
    folder = options.output_dir
    names = [SUMMARY_FILE, *(f"{domain.name}.jsonl" for domain in domains)]
    own = _any_of(" ".join([*names, *(f".{name}.*.tmp" for name in names)]))
    with writing(folder):
        earlier = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if other := sorted(name for name in earlier if not own.match(name)):
        raise UserError(
            f"--output-dir {folder} holds {other[0]}, which this tool did not write; pass a new "
            "folder"
        )
    by_domain = files_by_domain(files, domains)
    gathered: list[GatheredDomain] = []
    seen: set[bytes] = set()
    for domain in domains:
        if len(gathered) == options.num_domains:
            break
        found = _collect(domain, by_domain[domain.name], options, seen)
        has_enough = (
            found.num_bytes >= options.min_bytes_per_domain
            and len(found.documents) >= options.min_documents_per_domain
        )
        if has_enough:
            gathered.append(found)
    needed = min(MIN_DOMAINS, options.num_domains)
    if len(gathered) < needed:
        hint = ", or add folders with --roots" if collection == "installed" else ""
        raise UserError(
            f"only {len(gathered)} of the {needed} required domains have "
            f"{options.min_bytes_per_domain:,} bytes in {options.min_documents_per_domain} "
            f"documents; lower --min-bytes-per-domain{hint}"
        )
    summaries = []
    for found in gathered:
        file = f"{found.domain.name}.jsonl"
        with replacing(folder / file) as temporary, temporary.open("wb") as stream:
            for source, text in found.documents.items():
                line = {"text": text, "source": source}
                stream.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        summary = {"name": found.domain.name, "what": found.domain.what, "file": file}
        counts = {"documents": len(found.documents), "bytes": found.num_bytes}
        summaries.append({**summary, **counts, "packages": found.packages})
        earlier.discard(file)
    fields = [field.name for field in dataclasses.fields(GatherOptions)]
    limits = {
        name: getattr(options, name) for name in fields if name not in ("output_dir", "roots")
    }
    limits = {"collection": collection, **limits}
    write_json(folder / SUMMARY_FILE, {"domains": summaries, "limits": limits})
    # The earlier files include temporary files of a killed run.
    for name in earlier - {SUMMARY_FILE}:
        (folder / name).unlink(missing_ok=True)
    return gathered


def default_roots() -> tuple[Path, ...]:
    """The site-packages folders of this environment, without repetition."""
    paths = (Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(paths))


def list_files(roots: Iterable[Path]) -> dict[str, Path]:
    """Return relative path -> path of all regular files below ``roots``, sorted.

    Links are not followed.

    Raises:
        UserError: if a root is not a folder.
    """
    found: dict[str, Path] = {}
    skipped = _any_of(_SKIPPED)
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--roots {root} is not a folder; pass a site-packages folder")
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if not skipped.match(name)]
            for path in (Path(folder, name) for name in names if not skipped.match(name)):
                if not path.is_symlink() and path.is_file():
                    found.setdefault(path.relative_to(root).as_posix(), path)
    return dict(sorted(found.items()))


def files_by_domain(
    files: Mapping[str, Path], domains: Sequence[PackageDomain]
) -> dict[str, dict[str, Path]]:
    """Assign each of ``files`` to the first domain that matches its relative path, if any."""
    assigned: dict[str, dict[str, Path]] = {domain.name: {} for domain in domains}
    rules = [(assigned[d.name], _any_of(d.patterns), _any_of(d.excluded)) for d in domains]
    for source, path in files.items():
        for own, patterns, excluded in rules:
            if patterns.match(source) and not excluded.match(source):
                own[source] = path
                break
    return assigned


def _collect(
    domain: PackageDomain, paths: dict[str, Path], options: GatherOptions, seen: set[bytes]
) -> GatheredDomain:
    """Collect documents of one domain, up to its limit of bytes; add their digests to ``seen``.

    Documents are taken in the order of a hash of their source, so that a truncated domain has text
    of every package.
    """
    documents: dict[str, str] = {}
    packages: Counter[str] = Counter()
    found = {
        f"{source}#{number}" if number else source: text
        for source, path in paths.items()
        for number, text in enumerate(domain.documents(source, path))
    }
    for source in sorted(found, key=lambda source: hashlib.sha256(source.encode()).digest()):
        content = found[source].strip().encode()
        limit = options.max_document_bytes
        if len(content) > limit:  # truncate after a complete line
            content = content[: content.rfind(b"\n", 0, limit + 1) + 1].rstrip()
        text = content.decode()
        if len(text) < options.min_document_characters:
            continue
        if packages.total() + len(content) > options.max_bytes_per_domain:
            break
        digest = hashlib.sha256(content).digest()
        if digest not in seen:
            seen.add(digest)
            documents[source] = text
            packages[domain.package(source)] += len(content)
    names = tuple(name for name, _size in packages.most_common())
    return GatheredDomain(domain, dict(sorted(documents.items())), packages.total(), names)


def format_table(gathered: Sequence[GatheredDomain]) -> str:
    """Format the table: domain, documents, MB (10^6 bytes) and contents."""
    rows = [(f.domain.name, len(f.documents), f.num_bytes / 1e6, f.domain.what) for f in gathered]
    rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows), ""))
    header = f"{'domain':22}{'documents':>10}{'MB':>7}  contents"
    lines = [f"{name:22}{count:>10,}{size:>7.1f}  {what}" for name, count, size, what in rows]
    return "\n".join([header, *lines])


def _any_of(patterns: str) -> re.Pattern[str]:
    """Compile shell patterns into one regular expression; without patterns, it matches nothing."""
    return re.compile("|".join(map(fnmatch.translate, patterns.split())) or "(?!)")
