"""Swarms for any trainer: mixtures are those of compute_mixture, losses are matched by name."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.swarm import SwarmRecord, member_path
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import read_mixture
from megatron_chameleon.methods.swarm import CollectOptions, FitOptions, GenerateOptions
from megatron_chameleon.methods.swarm.any_trainer import collect_swarm, generate_swarm
from megatron_chameleon.methods.swarm.folder import open_folder
from megatron_chameleon.methods.swarm.sampling import mixtures_to_train
from megatron_chameleon.methods.swarm.space import SearchSpace
from tests.small_corpus import DOMAINS
from tests.unit.methods.swarm.test_train import swarm_options

ROOT = Path(__file__).resolve().parents[4]
OPTIONS = swarm_options()


def generate(corpus, folder, **changes):
    options = GenerateOptions(
        corpus=corpus.root, swarm_dir=folder, num_proxies=4, swarm=OPTIONS, **changes
    )
    generate_swarm(options)
    return np.array(SwarmRecord.load(folder).mixtures)


@pytest.fixture(scope="module")
def generated(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated") / "swarm"
    return generate(corpus, folder, format="olmo-core"), folder


def test_members_have_their_mixtures_in_a_format(generated, corpus):
    mixtures, folder = generated
    for member, weights in enumerate(mixtures):
        path = member_path(folder, member).with_suffix("")
        assert Mixture.load(path / "mixture.json").weights_for(DOMAINS, "") == weights.tolist()
        found = read_mixture(path / "mixture.olmo-core.yaml", "olmo-core").weights
        assert [found.get(name, 0.0) for name in DOMAINS] == weights.tolist()


def test_compute_mixture_accepts_the_folder(generated, corpus, tmp_path):
    mixtures, folder = generated
    options = FitOptions(
        corpus=corpus.root, output=tmp_path / "mixture.json", num_proxies=4, swarm=OPTIONS
    )
    space = SearchSpace.of(corpus, None)
    np.testing.assert_array_equal(mixtures_to_train(options, space), mixtures)
    assert open_folder(options.swarm, corpus, mixtures, folder) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="no finished member"):
        collect_swarm(CollectOptions(swarm_dir=folder))


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


HEADER = ["Name", "State", "Created", *(f"eval/{name}/loss" for name in DOMAINS)]
HEADER.append(f"train/{DOMAINS[1]}/loss")
ROWS = [
    ["swarm-00002", "finished", "2026-11-27", "2.0", "2.5", "3.0", "9"],
    ["swarm-00000", "finished", "2026-11-27", "1.0", "1.5", "2.0", "9"],
    ["swarm-00002-again", "crashed", "2026-11-27", "7.0", "7.5", "8.0", "9"],
    ["swarm-00001", "finished", "2026-11-27", "nan", "1.5", "2.0", "9"],
]


# Names that contain a number, but not the name of a member's folder.
FOREIGN = ["v2", "lr-0.00001", "1e00001", "run-000001", "9" * 5000]


def collect(folder, rows, **changes):
    path = folder / "export.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    collect_swarm(CollectOptions(swarm_dir=folder, losses=path, **changes))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wandb_export_is_matched_by_name(generated, corpus, tmp_path):
    mixtures, _ = generated
    folder = tmp_path / "swarm"
    generate(corpus, folder)
    order = [0, 1, 2, 5, 3, 4, 6]  # columns in another order than the domains
    collect(folder, [[row[position] for position in order] for row in (HEADER, *ROWS)])
    ratios, metrics = rows_of(folder / "ratios.csv"), rows_of(folder / "metrics.csv")
    assert ratios[0] == ["index", *(f"train_{name}" for name in DOMAINS)]
    assert metrics[0] == ["index", *(f"valid_{name}" for name in DOMAINS)]
    expected = [[0, *mixtures[0]], [2, *mixtures[2]]]
    np.testing.assert_array_equal(np.array(ratios[1:], float), expected)
    assert [[float(x) for x in row] for row in metrics[1:]] == [[0, 1, 1.5, 2], [2, 2, 2.5, 3]]
    collect(folder, [HEADER, *ROWS], column=((f"{DOMAINS[1]}={HEADER[-1]}",),))
    assert [row[1] for row in rows_of(folder / "metrics.csv")[1:]] == ["9.0", "9.0", "9.0"]
    # A data frame of W&B's API.
    summaries = [{"_step": 9, **dict(zip(HEADER[3:], row[3:], strict=True))} for row in ROWS]
    rows = [
        {"Name": row[0], "State": row[1], **summary, "_wandb": {"runtime": 9}}
        for row, summary in zip(ROWS, summaries, strict=True)
    ]
    pd.DataFrame(rows).to_csv(folder / "project.csv")
    collect_swarm(CollectOptions(swarm_dir=folder, losses=folder / "project.csv"))
    assert rows_of(folder / "metrics.csv") == metrics


@pytest.mark.parametrize(
    ("header", "row", "changes", "problem"),
    [
        (HEADER, ["swarm-00004", *ROWS[0][1:]], {}, "swarm-00004"),
        (HEADER, ["swarm-00000-b", *ROWS[0][1:]], {}, "swarm-00000-b"),
        *((HEADER, [name, *ROWS[0][1:]], {}, f"'{name}'") for name in FOREIGN),
        (HEADER, ["00002", *ROWS[0][1:]], {}, "member 2"),
        ([*HEADER[:-1], f"valid_{DOMAINS[0]}"], ROWS[1], {}, "both match"),
        ([*HEADER[:4], "eval/other/loss", *HEADER[5:]], ROWS[1], {}, "is a training loss"),
        ([*HEADER[:3], "eval/other/loss", *HEADER[4:]], ROWS[1], {}, DOMAINS[0]),
        (HEADER, ROWS[1], {"column": (("a=missing",),)}, "a=missing"),
        (HEADER, ROWS[1], {"column": (("missing",),)}, "--column missing"),
        (HEADER, ROWS[1], {"column": ((f"a={HEADER[3]}", f"b={HEADER[3]}"),)}, "another loss"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_that_does_not_match_is_rejected(
    generated, tmp_path, header, row, changes, problem
):
    folder = tmp_path / "swarm"
    folder.mkdir()
    shutil.copy(generated[1] / "swarm.json", folder)
    with pytest.raises(UserError, match=problem):
        collect(folder, [header, ROWS[0], row], **changes)
    assert not (folder / "metrics.csv").exists()


def test_a_task_of_an_array_trains_its_members(tmp_path):
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\necho "$SRUN_CPUS_PER_TASK $*"\n')
    (tmp_path / "srun").chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    outside["PATH"] = f"{tmp_path}:{outside['PATH']}"
    task = {**outside, "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "8"}
    launch = ["bash", str(ROOT / "examples" / "slurm" / "swarm.sbatch"), "--swarm-dir", "a"]
    command = "8 python -m megatron_chameleon swarm run --swarm-dir a --members"
    for environment, members in [(task, "3:3"), ({**task, "MEMBERS": "4"}, "12:15")]:
        done = subprocess.run(launch, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout == f"{command} {members}\n"
    assert subprocess.run(launch, env=outside, capture_output=True).returncode == 2
