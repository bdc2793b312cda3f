"""``swarm generate`` and ``swarm collect``: members for any trainer, this project's included."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.swarm import METRICS_NAME, RATIOS_NAME, SwarmRecord, member_path
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import FormatName, write_mixture
from megatron_chameleon.interchange.convert import with_corpus
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, read_losses
from megatron_chameleon.methods.output import warn
from megatron_chameleon.methods.swarm import CollectOptions, GenerateOptions
from megatron_chameleon.methods.swarm.folder import (
    collect,
    model_config,
    open_folder,
    options_of_swarm,
    write_member_mixture,
    write_tables,
)
from megatron_chameleon.methods.swarm.sampling import mixtures_to_train
from megatron_chameleon.methods.swarm.space import SearchSpace
from megatron_chameleon.training.run_folder import locked_run_folder

# Suffix of the files of each format that is not JSON.
SUFFIXES: dict[FormatName, str] = {
    "megatron-data-path": "txt",
    "megatron-data-args": "txt",
    "olmo-core": "yaml",
    "levanter": "yaml",
    "olmix": "yaml",
    "regmix": "yaml",
}


def generate_swarm(options: GenerateOptions) -> None:
    """Write ``swarm.json``, and a folder with its mixture for each member.

    Raises:
        UserError: if the model is unknown, the mixtures cannot be sampled or written in the format,
            or the folder holds another swarm.
    """
    corpus = Corpus.load(options.corpus)
    if len(corpus.names) < 2:
        raise UserError(f"{corpus.root} has only one domain; add another domain")
    model_config(options.swarm, corpus)
    space, folder, name = SearchSpace.of(corpus, options.freeze), options.swarm_dir, options.format
    mixtures = mixtures_to_train(options, space)
    files = list[tuple[Path, str]]()
    if name not in (None, "json"):
        for member, weights in enumerate(mixtures.tolist()):
            mixture = Mixture(dict(zip(corpus.names, weights, strict=True)), method="swarm")
            text = write_mixture(with_corpus(mixture, corpus), name)
            path = member_path(folder, member).with_suffix("")
            suffix = "csv" if name == "csv" else f"{name}.{SUFFIXES.get(name, 'json')}"
            files.append((path / f"mixture.{suffix}", text))
    with locked_run_folder(folder):
        open_folder(options.swarm, corpus, mixtures, folder, space.frozen_hash)
        for member, weights in enumerate(mixtures.tolist()):
            write_member_mixture(folder, member, corpus.names, weights)
        for path, text in files:
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="")
    last = member_path(folder, len(mixtures) - 1).with_suffix("")
    print(
        f"{len(mixtures)} members written to {last.parent}, 00000 to {last.name}",
        "train them: megatron-chameleon swarm run "
        + shlex.join(["--corpus", str(corpus.root), "--swarm-dir", str(folder)]),
        "or with another trainer, whose losses swarm collect --losses reads",
        sep="\n",
    )


def collect_swarm(options: CollectOptions) -> None:
    """Write ``ratios.csv`` and ``metrics.csv`` in the folder of a swarm.

    Raises:
        UserError: for a folder without a swarm, a table that does not match it, or no finished
            member.
    """
    record = SwarmRecord.load(options.swarm_dir)
    folder, count = record.root, len(record.mixtures)
    if options.losses is None:
        if not record.finished:
            raise UserError(f"{folder} has no finished member; train members with swarm run")
        collect(record, options_of_swarm(record))
    else:
        columns = dict[str, str]()
        for each in (value for group in options.column for value in group):
            name, equals, column = each.partition("=")
            if not (name and equals and column) or name in columns:
                raise UserError(f"--column {each}: must be NAME=COLUMN, once for each NAME")
            columns[name] = column
        runs = match_runs(options.losses, record, columns)
        write_tables(folder, runs)
        print(
            f"swarm: {len(runs.keys)} of {count} members measured; written to {folder} "
            f"({RATIOS_NAME}, {METRICS_NAME})"
        )
    print(
        "fit them: megatron-chameleon compute_mixture --method surrogate --corpus CORPUS "
        + shlex.join(["--swarm-dir", str(folder)])
        + (" --freeze FROZEN_MIXTURE.json" if record.frozen_mixture else "")
        + " --output MIXTURE.json"
    )


def match_runs(path: Path, swarm: SwarmRecord, columns: dict[str, str]) -> MixtureRuns:
    """Read the losses of members from another trainer's table; runs without a loss are left out.

    Args:
        path: CSV table, see :func:`read_losses`.
        swarm: the swarm.
        columns: name of a loss -> its column; if empty, the columns that match the domains of the
            corpus, held-out domains included.

    Raises:
        UserError: for a table that does not match the members or domains.
    """
    mixtures = np.array(swarm.mixtures)
    table = read_losses(path, [*swarm.domains, *swarm.held_out], columns)
    members = [_member_of(str(run), len(mixtures), path) for run in table.index]
    if len(set(members)) < len(members):
        twice = next(member for member in members if members.count(member) > 1)
        raise UserError(f"{path}: several runs of member {twice}; keep one")
    table = table.set_axis(members).sort_index()
    complete = table.notna().all(axis=1)
    if not complete.any():
        raise UserError(f"{path}: no run has a number in all of {', '.join(table)}")
    if not complete.all():
        left_out = ", ".join(map(str, table.index[~complete]))
        warn(f"{path}: members that lack a loss, such as diverged ones, are left out: {left_out}")
    table = table[complete]
    return MixtureRuns(
        keys=[str(member) for member in table.index],
        domains=swarm.domains,
        mixtures=mixtures[table.index.to_numpy()],
        metrics=list(table),
        losses=table.to_numpy(np.float64),
    )


def _member_of(run: str, count: int, path: Path) -> int:
    """Return the member that a run's name refers to: 12, 00012, or a name that ends with -00012.

    A number that is not written like this, as in lr-0.00012 or 1e00012, is no member's.
    """
    name = re.split(r"[^\w.]|_", run)[-1]
    member = int(name) if re.fullmatch("[0-9]{1,9}", name) else count
    spellings = [f"{member:05d}", *([str(member)] if name == run else [])]
    if member >= count or name not in spellings:
        raise UserError(
            f"{path}: run '{run}' is no member of the swarm: expected a name that ends with the "
            f"name of a member's folder, 00000 to {count - 1:05d}; remove other runs"
        )
    return member
