"""The report of a run: its sections, and its files as HTML, Markdown, CSV, PNG and PDF."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from megatron_chameleon.artifacts import Sweep
from megatron_chameleon.artifacts.files import read_json, replacing, require_new, write_json
from megatron_chameleon.artifacts.provenance import package_versions
from megatron_chameleon.artifacts.swarm import METRICS_NAME, RATIOS_NAME
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, mixture_run_tables
from megatron_chameleon.report import cost, downstream, figures, paper, results, weights
from megatron_chameleon.report.options import Projection
from megatron_chameleon.report.run_folder import (
    EVALUATION,
    REPORT,
    RunFolder,
    merge,
    require_one_corpus,
    run_labels,
)
from megatron_chameleon.report.tables import (
    MISSING,
    NOTE_WIDTH,
    SECONDS_PER_HOUR,
    Table,
    csv_table,
    is_best,
    markdown,
    markdown_table,
    printable,
    terminal_table,
)

PAGE_NAME, TABLES_NAME = "report.html", "tables.md"
# Folder with a CSV file for each table.
TABLES_FOLDER = "tables"
# This file lists a report's files. The next report removes listed files that it does not replace.
LIST_NAME = "report_files.json"
_FILE_NAME = re.compile(rf"[\w-]+\.\w+|{TABLES_FOLDER}/[\w-]+\.csv")
PACKAGES_OF_A_REPORT = ("megatron-chameleon", "numpy", "pandas", "matplotlib")
HASH_DIGITS = 12
NOT_EVALUATED = (
    f"{EVALUATION} holds no perplexity evaluation, so the report does not compare runs. Run "
    "megatron-chameleon evaluate perplexity for each base run, then make the report again."
)
# Name of a section -> its heading and introduction, in the order of the page.
SECTIONS = {
    "result": (
        "Held-out perplexity",
        "Perplexity on text held out from training. Lower is better.",
    ),
    "loss": ("Held-out loss", "Mean loss on the held-out text, with standard errors."),
    "bits-per-byte": (
        "Bits per byte",
        "Loss per byte of text, which can be compared across tokenizers.",
    ),
    "weights": ("Weights", "Each domain's share of the training tokens."),
    "downstream": (
        "Downstream tasks",
        "Accuracy of each model on benchmark tasks, and bits per byte of gold answers.",
    ),
    "cost": ("Cost", "The cost to obtain each mixture, and the cost of every stage."),
    "curves": ("Loss curves", "The loss during training, over all domains and per domain."),
    "tokens": (
        "Target and actual tokens",
        "Target tokens by weight, and tokens sampled in training.",
    ),
    "repeats": (
        "Repeated text",
        "Documents that repeat an earlier document of their domain.",
    ),
    "affinity": ("Affinity", "Similarity of the domains' embeddings."),
    "stability": ("Stability", "Change of the weights over the hyperparameters of the sweep."),
    "windows": ("Map of windows", "Embeddings of windows of text, projected to two dimensions."),
    "paper": ("The paper's numbers", "Results printed in the paper, next to the results here."),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """A section of the page: heading, introduction, tables, figures and facts.

    ``name`` is the section's anchor in the page.
    """

    name: str
    heading: str
    introduction: str
    tables: Sequence[Table] = ()
    pictures: Sequence[figures.Picture] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Everything in a report, in reading order.

    Attributes:
        title: title of the page.
        findings: one sentence per result.
        caveats: one sentence per limitation of the findings.
        sections: sections that have content.
        runs: mixtures and losses of the evaluated base runs; None if there are none.
    """

    title: str
    findings: Sequence[str]
    caveats: Sequence[str]
    sections: Sequence[Section]
    runs: MixtureRuns | None = None

    @property
    def pictures(self) -> list[figures.Picture]:
        """All pictures of the report, in the order of the sections."""
        return [picture for section in self.sections for picture in section.pictures]

    @property
    def tables(self) -> list[Table]:
        """All tables of the report, in the order of the sections."""
        return [table for section in self.sections for table in section.tables]

    @functools.cached_property
    def names(self) -> dict[Table, str]:
        """Table -> unique name for files and anchors: its title in lower case with hyphens."""
        names: dict[Table, str] = {}
        for table in self.tables:
            plain = unicodedata.normalize("NFKD", table.title).encode("ascii", "ignore").decode()
            stem = re.sub("[^a-z0-9]+", "-", plain.lower()).strip("-")[:60].rstrip("-") or "table"
            numbered = (f"{stem}-{n}" if n > 1 else stem for n in itertools.count(1))
            names[table] = next(name for name in numbered if name not in names.values())
        return names


def make_report(
    *runs: Path,
    baseline: str | None = None,
    output: Path | None = None,
    projection: Projection = "umap",
) -> Path:
    """Write the page, tables and figures of the run folders ``runs``, and print the tables.

    Everything is read and rendered before the first file is written.

    Args:
        runs: at least one run folder; several are merged, without duplicates.
        baseline: name of the evaluated base run that the others are compared with; None takes the
            first run trained with uniform weights.
        output: the folder to write to; None takes 7-report of the first run folder.
        projection: projection of the map of window embeddings.

    Returns:
        The folder that was written.

    Raises:
        UserError: if an artifact is missing or damaged, or if evaluations cannot be compared.
    """
    report = load_report(runs, baseline, projection)
    files = rendered(report)
    folder = runs[0] / REPORT if output is None else output
    write_report(folder, files)
    print("\n\n\n".join(map(terminal_table, report.tables)), end="\n\n")
    for sentence in (*report.findings, *report.caveats):
        print(textwrap.fill(printable(sentence), NOTE_WIDTH), end="\n\n")
    for picture in report.pictures:
        print(f"{picture.title}: {folder / picture.name}.png and .pdf")
    print(f"tables in Markdown: {folder / TABLES_NAME}, as CSV: {folder / TABLES_FOLDER}")
    if report.runs is not None:
        print(f"runs, to fit a mixture: --ratios {folder / RATIOS_NAME}", end=" ")
        print(f"--metrics {folder / METRICS_NAME}")
    print(f"the whole report in one page: {folder / PAGE_NAME}", flush=True)
    return folder


def load_report(
    runs: Sequence[Path], baseline: str | None = None, projection: Projection = "umap"
) -> Report:
    """Load the report of ``runs``; arguments and errors as in :func:`make_report`."""
    if not runs:
        raise UserError("no run folder given; pass at least one")
    distinct = list({os.path.realpath(run): run for run in reversed(runs)}.values())[::-1]
    folder = merge([RunFolder.load(run) for run in distinct])
    compared = results.compare(folder, baseline) if folder.evaluations else None
    if compared is None:
        require_one_corpus([folder])
        evaluated = [downstream.base_run_of(folder, name) for name in folder.downstream]
        if baseline is not None and baseline not in evaluated:
            choices = f"choose from {', '.join(evaluated)}, or " if evaluated else ""
            raise UserError(
                f"--baseline {baseline}: no result of this run in {folder.root / EVALUATION}; "
                f"{choices}run megatron-chameleon evaluate perplexity for each base run first"
            )
    swept = [] if folder.sweep is None else weights.swept_axes(folder.sweep)
    mixtures = figures.charted_mixtures(folder)
    tables: dict[str, Sequence[Table | None]] = {
        "weights": weights.weight_tables(folder),
        "downstream": downstream.downstream_tables(downstream.compare_downstream(folder, baseline)),
        "cost": cost.cost_tables(folder),
        "tokens": weights.token_tables(folder),
        "repeats": [weights.repeats_table(folder.corpus)],
        "stability": [weights.sweep_table(axis) for axis in swept],
        "paper": paper.paper_tables(folder, compared, baseline),
    }
    if compared is not None:
        tables |= {
            "result": [
                results.target_table(compared),
                results.seed_table(compared),
                results.perplexity_table(folder, compared),
            ],
            "loss": [results.loss_table(compared)],
            "bits-per-byte": [results.bits_per_byte_table(compared)],
        }
    pictures = {
        "weights": figures.weights_picture(mixtures),
        "curves": figures.loss_picture(folder),
        "affinity": figures.affinity_picture(mixtures),
        "stability": figures.sweep_picture(swept) if swept else None,
        "windows": figures.windows_picture(figures.window_map(folder, projection)),
    }
    sections = [
        Section(
            name,
            *texts,
            tables=[table for table in tables.get(name, ()) if table],
            pictures=[picture] if (picture := pictures.get(name)) else [],
        )
        for name, texts in SECTIONS.items()
    ]
    sections.append(_origins_section(folder, compared, distinct))
    return Report(
        " + ".join(ending or root.resolve().name for root, ending in folder.roots.items()),
        [*results.held_out_findings(compared), *results.findings(compared)] if compared else [],
        results.caveats(folder, compared) if compared else [NOT_EVALUATED],
        [section for section in sections if section.tables or section.facts or section.pictures],
        evaluated_runs(folder),
    )


def evaluated_runs(folder: RunFolder) -> MixtureRuns | None:
    """Collect mixtures and losses of the base runs with evaluations, to fit methods to them.

    The mixtures are shares of the actual training tokens, the losses are nats per token of each
    domain and bits per byte of each task's gold answers. A task with the name of a domain is called
    "NAME (task)". The result is None if no base run is evaluated.
    """
    losses: dict[str, dict[str, float]] = {}
    domains = {name for run in folder.base_runs.values() for name in run.domain_tokens}
    for name, result in folder.evaluations.items():
        found = {domain: each.loss for domain, each in result.domains.items()}
        losses.setdefault(name, {}).update(found)
        domains.update(found)
    for name, answers in folder.downstream.items():
        found = {
            f"{task} (task)" if task in domains else task: score.mean.bits_per_byte
            for task, score in answers.tasks.items()
            if score.mean is not None and score.mean.bits_per_byte is not None
        }
        losses.setdefault(downstream.base_run_of(folder, name), {}).update(found)
    tokens = pd.DataFrame.from_dict(
        {
            name: {domain: each.actual for domain, each in run.domain_tokens.items()}
            for name, run in folder.base_runs.items()
            if losses.get(name) and any(each.actual for each in run.domain_tokens.values())
        },
        orient="index",
        dtype=np.float64,
    ).fillna(0.0)
    if tokens.empty:
        return None
    table = pd.DataFrame.from_dict({name: losses[name] for name in tokens.index}, orient="index")
    return MixtureRuns(
        keys=list(tokens.index),
        domains=list(tokens.columns),
        mixtures=tokens.div(tokens.sum(axis=1), axis=0).to_numpy(),
        metrics=list(table.columns),
        losses=table.to_numpy(np.float64),
    )


def _origins_section(
    folder: RunFolder, compared: results.ComparedRuns | None, runs: Sequence[Path]
) -> Section:
    """Provenance of the report: folders, corpus, protocol, software and dates of its artifacts."""
    made = [a.provenance for a in folder.artifacts.values() if a.provenance is not None]
    days = sorted(each.created[:10] for each in made)
    versions = {f"{p} {v}": None for each in made for p, v in each.versions.items()}
    corpus, baseline = folder.corpus, compared.baseline if compared else None
    facts = {
        "run folders": ", ".join(map(str, runs)),
        "corpus": f"{len(corpus.domains):,} domains, {sum(corpus.train_tokens.values()):,} "
        f"training tokens, tokenizer {corpus.tokenizer.file} ({corpus.tokenizer.vocab_size:,} "
        f"ids), hash {corpus.hash[:HASH_DIGITS]}"
        if corpus
        else "",
        "evaluated on": compared.runs[0].result.protocol.describe() if compared else "",
        "compared with": baseline.name if baseline else "",
        "artifacts made": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        "by commit": ", ".join(sorted({each.git_commit for each in made if each.git_commit})),
        "with": ", ".join(versions),
        "report made with": ", ".join(
            f"{name} {version}" for name, version in package_versions(PACKAGES_OF_A_REPORT).items()
        ),
    }
    names = [run.name for run in compared.runs] if compared else list(folder.base_runs)
    labels = run_labels(folder.base_runs, names)
    cells = []
    for name in names:
        run, result = folder.base_runs.get(name), folder.evaluations.get(name)
        trained, evaluated = [MISSING] * 4, [MISSING] * 2
        if run is not None:
            trained = [run.mixture_method, f"{run.parameters:,}", f"{run.tokens:,}", run.status]
        if result is not None:
            evaluated = [f"{result.step:,}", result.checkpoint_hash[:HASH_DIGITS]]
        cells.append([name, labels[name], *trained, *evaluated])
    header = ["run", "label", "method", "parameters", "training tokens", "status"]
    header += ["evaluated at step", "checkpoint"]
    return Section(
        "origins",
        "Provenance",
        "Inputs of this report, and the software that made them.",
        [Table.of("Runs", header, cells)] if cells else [],
        facts={what: which for what, which in facts.items() if which},
    )


def rendered(report: Report) -> dict[str, bytes]:
    """Render every file of the report: path below the report's folder -> content."""
    files: dict[str, bytes] = {}
    for picture in report.pictures:
        files[f"{picture.name}.png"] = figures.png(picture.figure)
        files[f"{picture.name}.pdf"] = figures.pdf(picture.figure)
    for table, name in report.names.items():
        files[f"{TABLES_FOLDER}/{name}.csv"] = csv_table(table).encode("utf-8")
    if report.runs is not None:
        files[RATIOS_NAME], files[METRICS_NAME] = mixture_run_tables(report.runs)
    files[TABLES_NAME] = markdown_page(report).encode("utf-8")
    files[PAGE_NAME] = html_page(report).encode("utf-8")
    return files


def html_page(report: Report) -> str:
    """Render the page as HTML; equal reports give equal pages. All names are escaped."""

    def finalize(value: object) -> object:
        """Collapse white space and replace unprintable characters before text is escaped."""
        if isinstance(value, str) and not isinstance(value, Markup):
            return printable(value)
        return f"{value:g}" if isinstance(value, float) else value

    loader = jinja2.PackageLoader("megatron_chameleon.report", "template")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests |= {"best": is_best, "any_true": any}
    environment.filters |= {
        "csv_base64": lambda table: base64.b64encode(csv_table(table).encode()).decode(),
        "svg": lambda p: Markup(figures.svg_content(p.figure, f"figure-{p.name}")),
    }
    style, script = (loader.get_source(environment, n)[0] for n in ("style.css", "script.js"))
    return environment.get_template("report.html.j2").render(
        report=report,
        names=report.names,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def markdown_page(report: Report) -> str:
    """Render the sections as Markdown with their tables; figures are references to PNG files."""
    sentences = [f"- {markdown(sentence)}" for sentence in (*report.findings, *report.caveats)]
    parts = [f"# {markdown(report.title)}", *(["\n".join(sentences)] if sentences else [])]
    for section in report.sections:
        facts = [f"- {markdown(what)}: {markdown(which)}" for what, which in section.facts.items()]
        parts += [
            f"## {markdown(section.heading)}",
            markdown(section.introduction),
            *(f"![{markdown(picture.title)}]({picture.name}.png)" for picture in section.pictures),
            *(markdown_table(table, level=3) for table in section.tables),
            *(["\n".join(facts)] if facts else []),
        ]
    return "\n\n".join(parts) + "\n"


def write_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (path below ``folder`` -> content); remove other files of an old report.

    Args:
        folder: created if needed; other files in it are unchanged.
        files: at least one.

    Raises:
        UserError: if a file cannot be written (files written before it remain), if it would replace
            a file that no report wrote, or if the list of an earlier report's files is damaged.
    """
    path, earlier = folder / LIST_NAME, set[str]()
    if os.path.lexists(path):
        hint = "choose another --output, or remove the folder"
        names = read_json(path, hint).get("files")
        if not isinstance(names, list):
            raise UserError(f"{path} does not list the files of a report; {hint}")
        # A damaged list must not lead to the removal of other files.
        earlier = {name for name in map(str, names) if _FILE_NAME.fullmatch(name)}
    new = [folder / name for name in files if name not in earlier]
    require_new(new, "choose another --output, or move it away")
    # List the files before writing them: after an interruption, the next report can remove them.
    write_json(path, {"files": sorted({*earlier, *files})})
    for name, content in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(content)
    for name in earlier - set(files):
        (folder / name).unlink(missing_ok=True)
    write_json(path, {"files": sorted(files)})


def report_stability(sweep: Sweep) -> None:
    """Print the tables of ``sweep`` and its cost, and write its figure to 7-report.

    Raises:
        UserError: if a mixture cannot be read or the figure cannot be written.
    """
    axes, stem = weights.swept_axes(sweep), sweep.root / REPORT / "stability"
    figure = figures.sweep_picture(axes).figure
    for suffix, content in ((".png", figures.png(figure)), (".pdf", figures.pdf(figure))):
        with replacing(stem.with_suffix(suffix)) as temporary:
            temporary.write_bytes(content)
    tables = "\n\n\n".join(terminal_table(weights.sweep_table(axis)) for axis in axes)
    hours, centre = sweep.cost.device_seconds / SECONDS_PER_HOUR, sweep.root / sweep.centre.mixture
    print(
        f"\n{tables}\n\n"
        f"{len(sweep.points)} mixtures took {sweep.cost.flops:.2e} FLOPs and {hours:.3g} "
        "device-hours, including existing proxies\n"
        f"written to {sweep.root / sweep.FILE_NAME}, {stem}.png and {stem}.pdf\n"
        f"next: megatron-chameleon pretrain_gpt --mixture {centre}, or another file in "
        f"{centre.parent}",
        flush=True,
    )
