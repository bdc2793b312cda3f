"""Where a report comes from: folders, corpus, protocol, software and dates, from the artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_chameleon.artifacts import Provenance
from megatron_chameleon.artifacts.provenance import package_versions
from megatron_chameleon.report.comparison import Comparison, run_labels
from megatron_chameleon.report.document import Section
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import MISSING, Cell, Table

# What draws the pictures and adds up.
PACKAGES_OF_A_REPORT = ("megatron-chameleon", "numpy", "matplotlib")
HASH_SIGNS = 12


def origins_section(
    folder: RunFolder, comparison: Comparison | None, runs: Sequence[Path]
) -> Section:
    """The last section. Dates are those of the artifacts, so that equal data give equal pages.

    Args:
        folder: of the runs.
        comparison: its evaluated runs; None where no perplexity was evaluated.
        runs: the folders that were read.
    """
    found = list(_provenances(folder))
    baseline = None if comparison is None else comparison.baseline
    tables = _base_runs_tables(folder) if comparison is None else [_runs_table(comparison)]
    facts = {
        "run folders": ", ".join(map(str, runs)),
        "corpus": _corpus(folder),
        "evaluated on": comparison.runs[0].result.protocol.told() if comparison else "",
        "compared with": baseline.name if baseline else "",
        "artifacts made": _dates(each.created for each in found),
        "by commit": ", ".join(sorted({p.git_commit for p in found if p.git_commit})),
        "with": _versions(found),
        "report made with": ", ".join(
            f"{name} {version}" for name, version in package_versions(PACKAGES_OF_A_REPORT).items()
        ),
    }
    return Section(
        name="origins",
        heading="Where this comes from",
        introduction="What was read, and what it was made with.",
        tables=tuple(tables),
        facts=tuple((what, which) for what, which in facts.items() if which),
    )


def _corpus(folder: RunFolder) -> str:
    corpus = folder.corpus
    if corpus is None:
        return ""
    tokenizer = corpus.tokenizer
    return (
        f"{len(corpus.domains):,} domains, {sum(corpus.train_tokens.values()):,} training tokens, "
        f"tokenizer {tokenizer.file} ({tokenizer.vocab_size:,} ids), hash "
        f"{corpus.hash[:HASH_SIGNS]}"
    )


def _runs_table(comparison: Comparison) -> Table:
    rows = []
    for run in comparison.runs:
        known, result = run.run, run.result
        texts = (
            run.label,
            MISSING if known is None else known.mixture_method,
            MISSING if known is None else f"{known.parameters:,}",
            MISSING if known is None else f"{known.tokens:,}",
            f"{result.step:,}",
            result.checkpoint_hash[:HASH_SIGNS],
        )
        rows.append((Cell(run.name), *map(Cell, texts)))
    return Table(
        title="Evaluated runs",
        header=(
            "run",
            "called",
            "method",
            "parameters",
            "training tokens",
            "evaluated at step",
            "checkpoint",
        ),
        rows=tuple(rows),
    )


def _base_runs_tables(folder: RunFolder) -> list[Table]:
    """What was trained, where nothing of it was evaluated; none where nothing was."""
    labels = run_labels(folder.base_runs, folder.base_runs)
    rows = []
    for name, run in folder.base_runs.items():
        counts = (f"{count:,}" for count in (run.parameters, run.tokens, run.step))
        rows.append(tuple(map(Cell, (name, labels[name], run.mixture_method, *counts, run.status))))
    if not rows:
        return []
    header = ("run", "called", "method", "parameters", "training tokens", "step", "status")
    return [Table("Base runs", header, tuple(rows))]


def _provenances(folder: RunFolder) -> Iterable[Provenance]:
    artifacts = [
        folder.corpus,
        *folder.proxies.values(),
        *folder.embeddings.values(),
        *folder.mixtures.values(),
        *folder.base_runs.values(),
        *folder.evaluations.values(),
        *folder.downstream.values(),
    ]
    return (a.provenance for a in artifacts if a is not None and a.provenance is not None)


def _dates(created: Iterable[str]) -> str:
    days = sorted(each[:10] for each in created)
    if not days:
        return ""
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _versions(found: Sequence[Provenance]) -> str:
    """Every package with the versions that were used, of which there may be several."""
    used: dict[str, dict[str, None]] = {}
    for each in found:
        for package, version in each.versions.items():
            used.setdefault(package, {})[version] = None
    return ", ".join(f"{package} {' and '.join(versions)}" for package, versions in used.items())
