"""What mixtures by RegMix cost: their swarm, or nobody knows what."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    Mixture,
)
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.fits.regmix import compute_regmix
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.options.fits import DrawOptions
from megatron_chameleon.options.swarm import SwarmOptions
from megatron_chameleon.report.cost_tables import (
    mixture_cost_table,
)
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    cells_of,
    note_of,
    write_ledger_folder,
)
from tests.unit.report.report_samples import (
    NAMES,
)


@pytest.fixture
def root(tmp_path):
    return write_ledger_folder(tmp_path / "run")


SMALL_SWARM = {
    "num_proxies": 8,
    "draws": DrawOptions(smallest_weight=0.05),
    "swarm": SwarmOptions(
        model_size="nano",
        train_iters=2,
        lr_warmup_iters=1,
        seq_length=32,
        global_batch_size=2,
        eval_tokens=64,
    ),
}


def compute_by_regmix(root, corpus_root, name, **changes):
    trees = TreeOptions(num_trees=20, num_draws=500, num_best=10)
    output = root / f"4-mixture/{name}.json"
    compute_regmix(RegmixOptions(corpus=corpus_root, output=output, trees=trees, **changes))


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_a_swarm_of_two_targets_is_the_cost_of_each_and_once_in_the_total(root, corpus_root):
    before = ledger_of(RunFolder.load(root)).total
    work = root / "4-mixture/regmix"
    for target in NAMES[:2]:
        compute_by_regmix(
            root, corpus_root, f"regmix-{target}", work_dir=work, target=target, **SMALL_SWARM
        )
    ledger = ledger_of(RunFolder.load(root))
    swarm = ledger.entries["4-mixture/regmix/swarm"]
    members = [json.loads(path.read_text()) for path in (work / "swarm/members").iterdir()]
    assert len(members) == 8
    assert swarm.flops > 0
    assert swarm.flops == pytest.approx(sum(member["cost"]["flops"] for member in members))
    own = 0.0
    for target in NAMES[:2]:
        paid = ledger.mixtures[f"regmix-{target}"]
        assert paid.parts["4-mixture/regmix/swarm"] == swarm
        assert paid.cost.flops == swarm.flops
        total = paid.mixture.parameters["total_cost"]
        assert total == {
            "flops": pytest.approx(paid.cost.flops),
            "device_seconds": pytest.approx(paid.cost.device_seconds),
        }
        own += paid.mixture.cost.device_seconds
    assert ledger.total.flops == pytest.approx(before.flops + swarm.flops)
    seconds = before.device_seconds + swarm.device_seconds + own
    assert ledger.total.device_seconds == pytest.approx(seconds)


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_a_mixture_of_a_persons_tables_has_an_unknown_cost_and_no_ratio(
    root, corpus_root, tmp_path
):
    mixtures = np.random.default_rng(0).dirichlet(np.ones(len(NAMES)), 20)
    keys, names = [str(number) for number in range(20)], list(NAMES)
    tables = {"ratios": tmp_path / "ratios.csv", "metrics": tmp_path / "metrics.csv"}
    write_mixture_runs(MixtureRuns(keys, names, mixtures, names, 2 + mixtures), **tables)
    compute_by_regmix(root, corpus_root, "regmix", **tables)
    mixture = Mixture.load(root / "4-mixture/regmix.json")
    path = root / "4-mixture/copy.json"
    dataclasses.replace(mixture, parameters={"made_from": ["regmix.json"]}).save(path)
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    for name in ("regmix", "copy"):
        assert cells_of(table)[name] == ["unknown", "unknown", "-", "-"]
        assert note_of(root, name).endswith(f"not counted: the runs of {tables['ratios']}.")
