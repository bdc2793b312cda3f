"""tools/sweep_mixture.py on one rank: points, training, records, resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from functools import partial
from typing import Any

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, EmbeddingStore, Sweep, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.commands.sweep_mixture import main
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.chameleon import ExtractionOptions, WeightingOptions
from megatron_chameleon.methods.doge import DogeRuleOptions
from megatron_chameleon.methods.doremi import DoremiRuleOptions
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.sweep.options import AxisOptions, SweepOptions
from megatron_chameleon.methods.sweep.sweep import plan_sweep, point_of, sweep_mixture
from megatron_chameleon.model.flops import paper_parameters
from megatron_chameleon.report.weights import sweep_table, swept_axes
from megatron_chameleon.training.options import StoppingOptions
from tests.unit.methods.swarm.small_swarm import PROXY

SMALL = AxisOptions(sweep_steps=(6, 3), sweep_ridge=(1.0,), sweep_num_windows=(8,))
# Steps, steps of the run, windows, ridge. The proxy of the centre has 4 steps, and that of the
# other steps has 6.
SMALL_POINTS = [
    (4, 4, 16, 10.0),
    (3, 6, 16, 10.0),
    (6, 6, 16, 10.0),
    (4, 4, 16, 1.0),
    (4, 4, 8, 10.0),
]
PROXIES = ["nano-4steps-seed5", "nano-6steps-seed5"]
RULES: dict[str, Any] = {
    "doremi": {"doremi": DoremiRuleOptions(doremi_eta=0.1)},
    "doge": {"doge": DogeRuleOptions(doge_mu=0.3)},
}
STOP_AT_ONCE = StoppingOptions(exit_duration_in_mins=1e-6)


def proxy_options(**changes) -> ProxyOptions:
    return dataclasses.replace(PROXY, **{"seed": 5, "save_interval": 2, **changes})


def sweep_options(corpus, output, axes=SMALL, **changes) -> Any:
    """Options of a Chameleon sweep, with ``changes`` to the options of its proxy."""
    return SweepOptions(
        corpus=corpus.root,
        output=output,
        axes=axes,
        proxy=proxy_options(**changes),
        extraction=ExtractionOptions(num_windows=16),
        weighting=WeightingOptions(bootstrap_resamples=20),
    )


@pytest.fixture
def options(corpus, tmp_path):
    """``options(axes, **changes)``: options of a sweep in ``tmp_path / "run"``."""
    return partial(sweep_options, corpus, tmp_path / "run")


@pytest.fixture
def hooked(corpus, tmp_path):
    """``hooked(method, **changes)``: a DoReMi or DoGE sweep over two numbers of steps."""

    def make(method, **changes) -> Any:
        settings = {
            "axes": AxisOptions(sweep_steps=(2, 4)),
            "proxy": proxy_options(log_interval=1),
            **RULES.get(method, {}),
            **changes,
        }
        return SweepOptions(corpus=corpus.root, output=tmp_path / "run", method=method, **settings)

    return make


def run_sweep(options) -> Sweep:
    sweep = sweep_mixture(options)
    assert sweep is not None
    return sweep


@pytest.fixture(scope="module")
def finished_sweep(corpus, tmp_path_factory):
    """The read-only folder of a finished sweep, and the text that it printed."""
    root, printed = tmp_path_factory.mktemp("sweep") / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run_sweep(sweep_options(corpus, root)) == Sweep.load(root)
    return root, printed.getvalue()


@pytest.fixture
def swept(finished_sweep, tmp_path):
    """A copy of the finished sweep in ``tmp_path / "run"``."""
    return Sweep.load(shutil.copytree(finished_sweep[0], tmp_path / "run"))


def values_of(sweep: Sweep):
    order = ("steps", "train_iters", "num_windows", "ridge")
    return [tuple(point.settings[name] for name in order) for point in sweep.points]


def test_axes_are_sorted_and_points_distinct(options):
    axes = AxisOptions(
        sweep_steps=(5000, 1000, 2000, 5000),
        sweep_model=("210m", "60m"),
        sweep_ridge=(100.0, 10.0),
    )
    found, points = plan_sweep(options(axes, model="82m", train_iters=2000))
    assert found == {
        "steps": [1000, 2000, 5000],
        "model": ["60m", "82m", "210m"],
        "ridge": [10.0, 100.0],
    }
    centre = {"model": "82m", "steps": 2000, "train_iters": 2000, "num_windows": 16, "ridge": 10.0}
    assert points[0] == centre
    steps = [{**centre, "steps": n, "train_iters": 5000} for n in (1000, 2000, 5000)]
    assert points[1:4] == steps
    assert len(points) == 1 + 3 + 2 + 1
    assert all(sum(p[name] != centre[name] for name in centre) == 1 for p in points[4:])
    _, points = plan_sweep(options(AxisOptions(sweep_steps=(2, 4))))
    assert [point["steps"] for point in points] == [4, 2]  # the last step is the centre
    scaled = WeightingOptions(recipe="scaled")  # a relative ridge cannot be varied
    with pytest.raises(UserError, match="--sweep-ridge"):
        plan_sweep(dataclasses.replace(options(), weighting=scaled))


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("chameleon", {"axes": AxisOptions()}, "--sweep-steps, "),
        ("chameleon", {"axes": AxisOptions(sweep_model=("99m",))}, "99m"),
        ("chameleon", {"axes": AxisOptions(sweep_model=())}, "--sweep-model"),
        ("chameleon", {"axes": AxisOptions(sweep_steps=(1,))}, "1 steps.*': --lr-warmup"),
        ("chameleon", {"doge": DogeRuleOptions(doge_mu=0.3)}, "--doge-mu 0.3"),
        ("doremi", {"axes": AxisOptions(sweep_ridge=(1.0,))}, "--sweep-ridge"),
        ("doge", {"mode": "finetune"}, "--mode finetune"),
        ("doge", {"extraction": ExtractionOptions(num_windows=8)}, "--num-windows 8"),
    ],
)
def test_mistakes_are_errors_before_training(hooked, tmp_path, method, changes, problem):
    with pytest.raises(UserError, match=problem):
        sweep_mixture(hooked(method, **changes))
    assert not (tmp_path / "run").exists()


def test_every_proxy_and_store_is_computed_once(finished_sweep):
    root, printed = finished_sweep
    swept = Sweep.load(root)
    assert values_of(swept) == SMALL_POINTS
    assert swept.axes == {"steps": [3, 6], "ridge": [1.0, 10.0], "num_windows": [8, 16]}
    proxies, stores = (sorted((root / each).iterdir()) for each in ("2-proxy", "3-embeddings"))
    assert [path.name for path in proxies] == PROXIES
    assert [path.name for path in stores] == [
        f"{PROXIES[0]}-16windows",
        f"{PROXIES[0]}-8windows",
        f"{PROXIES[1]}-16windows",
        f"{PROXIES[1]}-step3-16windows",
    ]
    assert printed.count("nothing to do") == 3
    for point in swept.points:
        mixture, run = swept.load_mixture(point), TrainingRun.load(root / point.made_from[0])
        assert mixture.parameters["recipe"]["ridge"] == point.settings["ridge"]
        assert set(mixture.parameters["windows"].values()) == {point.settings["num_windows"]}
        assert (run.status, run.step) == ("finished", point.settings["train_iters"])
        assert mixture.provenance is not None
        proxy = CheckpointRecord.load(step_folder(run.root, int(point.settings["steps"])))
        assert mixture.provenance.inputs["checkpoint"] == proxy.hash
        trained = sum(proxy.domain_tokens.values())
        embedded = 32 * 3 * int(point.settings["num_windows"])
        assert mixture.parameters["paper_flops"] == paper_parameters("nano") * 2 * embedded
        assert mixture.parameters["paper_flops_of_proxy"] == paper_parameters("nano") * 6 * trained
    along = [point.settings["steps"] for point in swept.along("steps")]
    assert along == [3, 6]
    costs = [TrainingRun.load(path).cost for path in proxies]
    costs += [EmbeddingStore.load(path).cost for path in stores]
    assert swept.cost.flops == pytest.approx(sum(cost.flops for cost in costs))
    table = sweep_table(swept_axes(swept)[0])
    assert list(table.cells) == ["domain", "3", "6 (reference)", "largest change"]
    assert "factor of --shrink" in set(table.cells["domain"])


def test_a_sweep_is_extended_and_lost_artifacts_are_restored(swept, options, tmp_path, capsys):
    root = tmp_path / "run"
    metrics = [root / "2-proxy" / name / "metrics.jsonl" for name in PROXIES]
    before = [path.stat().st_mtime_ns for path in metrics]
    shutil.rmtree(root / "3-embeddings" / f"{PROXIES[0]}-8windows")
    (root / "sweep.json").unlink()
    (root / swept.points[4].mixture).unlink()
    more = dataclasses.replace(SMALL, sweep_ridge=(1.0, 100.0))
    sweep = run_sweep(options(more))
    assert values_of(sweep) == [*SMALL_POINTS[:4], (4, 4, 16, 100.0), SMALL_POINTS[4]]
    assert [path.stat().st_mtime_ns for path in metrics] == before
    assert capsys.readouterr().out.count("embedding 0 domains took") == 5
    assert [point for point in sweep.points if point.settings["ridge"] != 100.0] == swept.points


def test_a_step_that_an_unfinished_run_has_passed_is_an_error(options, tmp_path):
    axes = AxisOptions(sweep_steps=(3, 6))
    stopped = options(axes, train_iters=6, stopping=STOP_AT_ONCE)
    assert main(stopped) == STOPPED_STATUS
    run = TrainingRun.load(tmp_path / "run/2-proxy" / PROXIES[1])
    assert run.step == 1
    more = AxisOptions(sweep_steps=(1, 3, 6))
    plan_sweep(options(more, train_iters=6))  # the checkpoint of step 1 exists
    step_folder(run.root, 1).rename(step_folder(run.root, 2))
    with pytest.raises(UserError, match="no checkpoint of step 1"):
        plan_sweep(options(more, train_iters=6))


def test_a_stopped_sweep_resumes_and_plots_the_weights(options, tmp_path, capsys):
    assert main(options(stopping=STOP_AT_ONCE)) == STOPPED_STATUS
    run = TrainingRun.load(tmp_path / "run/2-proxy" / PROXIES[0])
    assert (run.status, run.step) == ("interrupted", 1)
    assert not Sweep.exists(tmp_path / "run")
    assert not main(options())
    assert values_of(Sweep.load(tmp_path / "run")) == SMALL_POINTS
    assert TrainingRun.load(run.root).step == 4
    assert "Weights over ridge" in capsys.readouterr().out
    assert (tmp_path / "run/7-report/stability.png").is_file()


@pytest.mark.parametrize("method", ["doremi", "doge"])
def test_a_sweep_of_a_hooked_method(hooked, tmp_path, capsys, method):
    root, options = tmp_path / "run", hooked(method)
    sweep = run_sweep(options)
    assert sweep.axes == {"steps": [2, 4]}
    mixtures = [sweep.load_mixture(point) for point in sweep.points]
    (run,) = (each for each in root.rglob("run.json") if each.parent.name == "proxy")
    for mixture, step in zip(mixtures, (4, 2), strict=True):
        hook = CheckpointRecord.load(step_folder(run.parent, step)).hook
        assert hook is not None
        assert list(mixture.weights.values()) == pytest.approx(hook.state["mean"])
        assert mixture.parameters["trajectory"]["steps"][-1] == step
        assert mixture.parameters["steps_averaged"] == hook.state["counted"]
    assert mixtures[0].weights != mixtures[1].weights
    spent = [mixture.parameters["paper_flops"] for mixture in mixtures]
    assert spent[1] < spent[0]
    runs = [path.parent for path in root.rglob("run.json")]
    assert len(runs) == (2 if method == "doremi" else 1)
    costs = [TrainingRun.load(run).cost.flops for run in runs]
    assert sweep.cost.flops == pytest.approx(sum(costs))
    assert run_sweep(options) == Sweep.load(root)


@pytest.mark.parametrize(
    ("method", "rule_type", "settings"),
    [
        ("doge", DogeRuleOptions, [(), (0.01,), (0.3,), (0.3, 0.1)]),
        ("doremi", DoremiRuleOptions, [(), ("original", 1.0), ("fork",)]),
    ],
)
def test_each_rule_has_its_own_proxies(hooked, method, rule_type, settings):
    """The default rule is listed twice; the names of its proxies contain no digest."""
    values: dict[str, Any] = {"model": "nano", "steps": 4, "train_iters": 4}
    points = [point_of(hooked(method, **{method: rule_type(*s)}), values) for s in settings]
    names = [point.made_from[-1].parent.name for point in points]
    assert names == [point.mixture.stem for point in points]
    assert names[0] == names[1] == f"{method}-nano-4steps-seed5"
    assert len(set(names)) == len(settings) - 1
