"""tools/sweep_mixture.py on one rank: which points there are, what is trained, what is written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from functools import partial

import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EmbeddingStore,
    Mixture,
    Sweep,
    TrainingRun,
    find_checkpoint,
)
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.common.proxy_run import forward_only
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.methods.sweeps.chameleon import (
    centre_of,
    mixture_options,
    run_options,
)
from megatron_chameleon.methods.sweeps.points import Knobs, axes_of, points_of, told
from megatron_chameleon.methods.sweeps.sweep import plan_sweep, sweep_mixture
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.parallel import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.pretrain import pretrain
from tests.small_corpus import DOMAINS
from tools.sweep_mixture import main

PAPER = AxisOptions(
    sweep_train_iters=(1000, 2000, 5000, 10000),
    sweep_model_size=("60m", "82m", "124m", "210m"),
    sweep_ridge=(1, 10, 100),
    sweep_num_windows=(2048, 4096, 8192),
)
CENTRE: Knobs = {"model_size": "82m", "train_iters": 2000, "num_windows": 4096, "ridge": 10.0}
SMALL = AxisOptions(sweep_train_iters=(4, 2), sweep_ridge=(1.0,), sweep_num_windows=(8,))
SMALL_POINTS = [(4, 16, 10.0), (2, 16, 10.0), (4, 16, 1.0), (4, 8, 10.0)]
PROXIES = ["nano-2steps-seed5", "nano-4steps-seed5"]


def sweep_options(corpus, output, axes=SMALL, **changes) -> SweepOptions:
    """Of proxies of a few steps; changes go to the proxy."""
    settings = {
        "model_size": "nano",
        "train_iters": 4,
        "seq_length": 32,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "seed": 5,
        "save_interval": 2,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=1),
    }
    return SweepOptions(
        corpus=corpus.root,
        output=output,
        axes=axes,
        proxy=ProxyOptions(**{**settings, **changes}),
        extraction=ExtractionOptions(num_windows=16),
        weighting=RecipeOptions(bootstrap_resamples=20),
    )


@pytest.fixture
def options(corpus, tmp_path):
    """``options(axes, **changes)``: of a sweep into ``tmp_path / "run"``."""
    return partial(sweep_options, corpus, tmp_path / "run")


@pytest.fixture(scope="module")
def finished_sweep(corpus, tmp_path_factory):
    """The folder of a whole sweep, for reading only, and what was said."""
    root, said = tmp_path_factory.mktemp("sweep") / "run", io.StringIO()
    with contextlib.redirect_stdout(said):
        assert swept_with(sweep_options(corpus, root)) == Sweep.load(root)
    return root, said.getvalue()


def swept_with(options) -> Sweep:
    """The record of a sweep that comes to its end."""
    sweep = sweep_mixture(options)
    assert sweep is not None
    return sweep


def recipe(options, **knobs):
    return dataclasses.replace(options, weighting=RecipeOptions(bootstrap_resamples=20, **knobs))


def knobs_of(sweep: Sweep):
    order = ("train_iters", "num_windows", "ridge")
    return [tuple(point.knobs[knob] for knob in order) for point in sweep.points]


@pytest.fixture
def swept(finished_sweep, tmp_path):
    """A copy of that sweep in ``tmp_path / "run"``, to do with as one likes."""
    return Sweep.load(shutil.copytree(finished_sweep[0], tmp_path / "run"))


def test_the_papers_sweep_has_eleven_points():
    axes = axes_of(PAPER, CENTRE, "chameleon")
    points = points_of(axes, CENTRE)
    assert points[0] == CENTRE
    assert len(points) == 11
    assert len({told(point) for point in points}) == 11
    assert all(sum(p[knob] != CENTRE[knob] for knob in CENTRE) == 1 for p in points[1:])


def test_axes_are_sorted_and_hold_the_centre_once():
    given = AxisOptions((5000, 1000, 5000), ("210m", "60m"), (100.0, 10.0), None)
    axes = axes_of(given, CENTRE, "chameleon")
    assert axes == {
        "train_iters": [1000, 2000, 5000],
        "model_size": ["60m", "82m", "210m"],
        "ridge": [10.0, 100.0],
    }
    assert len(points_of(axes, CENTRE)) == 1 + 2 + 2 + 1


def test_a_point_is_told_by_its_knobs():
    assert told(CENTRE) == "82m, 2,000 steps, 4,096 windows, ridge 10"
    assert told({"train_iters": 10000}) == "10,000 steps"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (AxisOptions(), "nothing to vary: give at least one of --sweep-train-iters, "),
        (AxisOptions(sweep_ridge=()), "--sweep-ridge: give the values to try, or leave it out"),
        (AxisOptions(sweep_model_size=("99m",)), "99m: there is no such size; choose from 60m"),
    ],
)
def test_axes_that_cannot_be_are_refused(axes, message):
    with pytest.raises(UserError, match=message):
        axes_of(axes, CENTRE, "chameleon")


def test_a_knob_that_a_method_does_not_have_is_refused():
    with pytest.raises(UserError, match="--sweep-ridge: doremi has no such knob"):
        axes_of(AxisOptions(sweep_ridge=(1.0,)), {"train_iters": 2000}, "doremi")


def test_the_ridge_of_the_centre_is_the_recipes_unless_given(options):
    assert centre_of(options())["ridge"] == 10.0
    assert centre_of(recipe(options(), ridge=3.0))["ridge"] == 3.0
    assert centre_of(recipe(options(), recipe="scaled", ridge=3.0))["ridge"] == 3.0
    assert "ridge" not in centre_of(recipe(options(), recipe="scaled"))
    with pytest.raises(UserError, match=r"--sweep-ridge: .* or give --ridge for the centre"):
        plan_sweep(recipe(options(), recipe="scaled"))


@pytest.mark.parametrize(
    ("axes", "changes", "message"),
    [
        (AxisOptions((-3,)), {}, "'nano, -3 steps, .*': --train-iters -3: "),
        (AxisOptions((1,)), {}, "'nano, 1 steps, .*': --lr-warmup-iters 1 leaves nothing"),
        (AxisOptions(None, None, (0.0,)), {}, "ridge 0': --ridge 0.0: "),
        (AxisOptions(None, None, None, (0,)), {}, "0 windows, .*': --num-windows 0: "),
        (AxisOptions((2,)), {"seq_length": 0}, "--seq-length 0: "),
        (AxisOptions((2,)), {"model_size": "big"}, "big: there is no such size"),
    ],
)
def test_a_point_that_cannot_be_found_is_refused_before_anything_is_trained(
    options, tmp_path, axes, changes, message
):
    with pytest.raises(UserError, match=message):
        sweep_mixture(options(axes, **changes))
    assert not (tmp_path / "run").exists()


def test_a_layer_that_only_some_sizes_have_is_refused(options, tmp_path):
    extraction = ExtractionOptions(layer=6, num_windows=16)
    axes = AxisOptions(sweep_model_size=("mini", "nano"))
    given = dataclasses.replace(options(axes, model_size="mini"), extraction=extraction)
    told_where = r"'nano, 4 steps.*: --layer 6: the model has layers 1 to 4"
    with pytest.raises(UserError, match=told_where):
        sweep_mixture(given)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_read_is_not_interleaved():
    training = TrainingParallelOptions(2, 2, True, num_virtual_stages_per_pipeline_rank=2)
    assert type(forward_only(training)) is ParallelOptions
    assert forward_only(training) == ParallelOptions(2, 2, True)


def test_every_point_is_found_and_every_proxy_and_store_made_once(finished_sweep):
    root, said = finished_sweep
    swept = Sweep.load(root)
    assert knobs_of(swept) == SMALL_POINTS
    assert sorted(path.name for path in (root / "2-proxy").iterdir()) == PROXIES
    stores = sorted(path.name for path in (root / "3-embeddings").iterdir())
    sixteen = [f"{name}-16windows" for name in PROXIES]
    assert stores == sorted([*sixteen, f"{PROXIES[1]}-8windows"])
    for point in swept.points:
        mixture = swept.load_mixture(point)
        assert mixture.parameters["recipe"]["ridge"] == point.knobs["ridge"]
        assert mixture.parameters["windows"] == dict.fromkeys(DOMAINS, point.knobs["num_windows"])
        run = TrainingRun.load(root / point.made_from[0])
        assert (run.status, run.step) == ("finished", point.knobs["train_iters"])
        assert run.mixture == pytest.approx(Mixture.uniform(list(DOMAINS)).weights)
        proxy = CheckpointRecord.load(find_checkpoint(run.root))
        assert mixture.provenance is not None
        assert mixture.provenance.inputs["checkpoint"] == proxy.hash
    for number in range(1, 5):
        assert f"point {number} of 4: nano, " in said
    assert said.count("nothing to do") == 2


def test_the_cost_counts_each_artifact_once(finished_sweep):
    root, swept = finished_sweep[0], Sweep.load(finished_sweep[0])
    runs = [TrainingRun.load(path).cost for path in (root / "2-proxy").iterdir()]
    stores = [EmbeddingStore.load(path).cost for path in (root / "3-embeddings").iterdir()]
    mixtures = [swept.load_mixture(point).cost for point in swept.points]
    assert swept.cost.flops == pytest.approx(sum(c.flops for c in [*runs, *stores]))
    seconds = sum(c.device_seconds for c in [*runs, *stores, *mixtures])
    assert swept.cost.device_seconds == pytest.approx(seconds)
    assert (len(runs), len(stores), len(mixtures)) == (2, 3, 4)


def test_a_point_is_what_the_two_tools_give_one_after_the_other(swept, options, tmp_path):
    """The second proxy that a process trains is the same as the first of another would be."""
    given = dataclasses.replace(options(), output=tmp_path / "alone")
    knobs = swept.points[1].knobs
    pretrain(run_options(given, knobs))
    compute_mixture(mixture_options(given, knobs))
    alone = Mixture.load(mixture_options(given, knobs).output)
    assert swept.load_mixture(swept.points[1]).weights == alone.weights


def test_a_sweep_with_more_values_uses_what_is_there(swept, options, tmp_path, capsys):
    metrics = [tmp_path / "run/2-proxy" / name / "metrics.jsonl" for name in PROXIES]
    before = [path.stat().st_mtime_ns for path in metrics]
    capsys.readouterr()
    more = dataclasses.replace(SMALL, sweep_ridge=(1.0, 100.0))
    sweep = swept_with(options(more))
    assert knobs_of(sweep) == [*SMALL_POINTS[:3], (4, 16, 100.0), SMALL_POINTS[3]]
    assert [path.stat().st_mtime_ns for path in metrics] == before
    assert capsys.readouterr().out.count("embedding 0 domains took") == 5
    kept = {point.mixture: point.mixture_hash for point in sweep.points}
    assert all(kept[point.mixture] == point.mixture_hash for point in swept.points)


def test_a_sweep_that_is_asked_to_stop_goes_on_where_it_was(options, tmp_path, capsys):
    stopping = StoppingOptions(exit_duration_in_mins=1e-6)
    assert sweep_mixture(options(stopping=stopping)) is None
    assert "stopped in point 1 of 4; the same command goes on" in capsys.readouterr().out
    run = TrainingRun.load(tmp_path / "run/2-proxy" / PROXIES[1])
    assert (run.status, run.step) == ("interrupted", 1)
    assert not Sweep.exists(tmp_path / "run")
    assert not (tmp_path / "run/3-embeddings").exists()
    sweep = swept_with(options())
    assert knobs_of(sweep) == SMALL_POINTS
    assert "continuing at step 1:" in capsys.readouterr().out


def test_what_was_lost_is_made_again(swept, options, tmp_path):
    root = tmp_path / "run"
    shutil.rmtree(root / "3-embeddings" / f"{PROXIES[1]}-8windows")
    (root / "sweep.json").unlink()
    (root / swept.points[3].mixture).unlink()
    again = swept_with(options())
    assert again.points == swept.points


def test_proxies_of_other_options_are_refused_before_any_is_trained(swept, options, tmp_path):
    """Also those of a later point; that of the centre would be the first one."""
    other, centre = (tmp_path / "run/2-proxy" / name for name in PROXIES)
    shutil.rmtree(centre)
    with pytest.raises(UserError, match="--global-batch-size 4, not 8") as refused:
        sweep_mixture(options(global_batch_size=8))
    assert str(refused.value).startswith("point 'nano, 2 steps, ")
    assert f"give another --output, or delete {other} to start anew" in str(refused.value)
    assert not centre.exists()


def test_a_sweep_that_was_stopped_leaves_with_a_status_that_says_so(options):
    stopping = StoppingOptions(exit_duration_in_mins=1e-6)
    assert main(options(stopping=stopping)) == STOPPED_STATUS


def test_the_record_says_how_it_was_made(swept, options, corpus, tmp_path):
    body = json.loads((tmp_path / "run/sweep.json").read_text())
    assert (body["kind"], body["format_version"]) == ("sweep", 1)
    assert body["axes"] == {"train_iters": [2, 4], "ridge": [1.0, 10.0], "num_windows": [8, 16]}
    assert body["provenance"]["inputs"] == {"corpus": corpus.hash}
    assert body["provenance"]["options"]["proxy"]["seed"] == 5
    assert not any(str(tmp_path) in point["mixture"] for point in body["points"])


def test_the_tool_shows_what_it_found(swept, options, tmp_path, capsys):
    assert not main(options(AxisOptions(sweep_ridge=(1.0,))))
    assert "Weights over ridge" in capsys.readouterr().out
    report = sorted(path.name for path in (tmp_path / "run/7-report").iterdir())
    assert report == ["stability.pdf", "stability.png"]
