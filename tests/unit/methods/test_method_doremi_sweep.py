"""DoReMi in tools/sweep_mixture.py and in its launcher."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import (
    Sweep,
    TrainingRun,
)
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.excess_loss.plan import recipe_of
from megatron_chameleon.methods.sweeps.doremi import files_of
from megatron_chameleon.methods.sweeps.points import size_and_steps
from megatron_chameleon.methods.sweeps.sweep import sweep_mixture
from megatron_chameleon.mixture.doremi import RECIPES
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.mixture import ExtractionOptions
from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from tests.unit.launched import Launcher, write_everything
from tests.unit.methods.doremi_runs import (
    SLOW,
    options,
    proxy_options,
)

__all__ = ["options"]  # fixtures


def sweep_options(corpus, output, **changes) -> SweepOptions:
    settings = {"axes": AxisOptions(sweep_train_iters=(4, 3)), "doremi": SLOW, **changes}
    return SweepOptions(
        corpus=corpus.root,
        output=output,
        method="doremi",
        proxy=proxy_options(train_iters=4),
        **settings,
    )


def test_a_sweep_finds_the_mixture_at_every_point(corpus, tmp_path, capsys):
    root = tmp_path / "run"
    sweep = sweep_mixture(sweep_options(corpus, root))
    assert sweep == Sweep.load(root)
    assert sweep is not None
    names = ["nano-3steps-seed1234", "nano-4steps-seed1234"]
    digest = sha256_of_json(dataclasses.asdict(recipe_of(SLOW)))[:8]
    runs = sorted(path.relative_to(root).as_posix() for path in root.rglob("run.json"))
    assert runs == sorted(
        [f"2-proxy/{name}/run.json" for name in names]
        + [f"2-proxy/doremi-{name}-{digest}/proxy/run.json" for name in names]
    )
    for point in sweep.points:
        mixture = sweep.load_mixture(point)
        assert mixture.parameters["eta"] == 0.1
        steps = {TrainingRun.load(root / folder).step for folder in point.made_from}
        assert steps == {point.knobs["train_iters"]}
    costs = [TrainingRun.load(root / path).cost.flops for path in (Path(p).parent for p in runs)]
    assert sweep.cost.flops == pytest.approx(sum(costs))


def test_another_rule_of_a_sweep_has_proxies_of_its_own_and_the_same_references(corpus, tmp_path):
    given = sweep_options(corpus, tmp_path / "run")
    knobs = size_and_steps(given)
    names = []
    for rule in (SLOW, DoremiRule(doremi_eta=0.2), DoremiRule("fork"), DoremiRule(doremi_eta=1.0)):
        files = files_of(dataclasses.replace(given, doremi=rule), knobs)
        names.append(files.made_from[1].parent.name)
        assert files.mixture.stem == names[-1]
        assert files.made_from[0].name == "nano-4steps-seed1234"
    assert len(set(names)) == 4
    assert names[-1] == "doremi-nano-4steps-seed1234"  # the default


def test_what_lies_in_a_sweeps_folder_is_refused_with_a_flag_that_it_has(
    corpus, tmp_path, finished_run
):
    given = sweep_options(corpus, tmp_path / "run")
    shutil.copytree(finished_run, tmp_path / "run/2-proxy/nano-4steps-seed1234")
    said = r"holds a run with --train-iters 6, not 4; give another --output, or delete .*-seed1234 "
    with pytest.raises(UserError, match=said):
        sweep_mixture(given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axes": AxisOptions(sweep_ridge=(1.0,))}, "--sweep-ridge: doremi has no such knob"),
        ({"mode": "finetune"}, "--mode finetune: DoReMi has no weights of that kind"),
        (
            {"extraction": ExtractionOptions(num_windows=8)},
            "--num-windows 8: --method doremi has no use for it; leave it out",
        ),
        ({"method": "chameleon"}, "--doremi-eta 0.1: --method chameleon has no use for it"),
        ({"doremi": DoremiRule(doremi_eps=2.0)}, "eps is 2.0: it lies from 0 on and below 1"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(corpus, tmp_path, changes, said):
    given = dataclasses.replace(sweep_options(corpus, tmp_path / "run"), **changes)
    with pytest.raises(UserError, match=said):
        sweep_mixture(given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", ["82m", "tiny"])
def test_the_launcher_finds_the_mixture_of_the_paper(tmp_path, size):
    write_everything(tmp_path)
    choices = {} if size == "82m" else {"SIZE": size}
    launched = Launcher(tmp_path)("baselines/doremi", "--", "--doremi-eps", "0.01", **choices)
    assert launched.status == 0, launched.errors
    (call,) = launched.calls
    given = call.options
    assert (call.program, type(given)) == ("torchrun", DoremiOptions)
    assert (given.proxy.model_size, given.reference_mixture) == (size, None)  # so, uniform
    assert (given.rule.doremi_variant, given.rule.doremi_eps) == ("original", 0.01)
    root = "runs/slimpajama" if size == "82m" else "runs/tiny/doremi"
    assert given.output == Path(root) / "4-mixture/doremi.json"
    if size == "82m":
        assert (given.proxy.train_iters, given.proxy.global_batch_size) == (10_000, 128)
        assert (given.proxy.optimizer.lr, given.proxy.optimizer.min_lr) == (5e-4, 1e-4)
        assert (recipe_of(given.rule).eta, given.proxy.bf16) == (1.0, True)
    else:
        assert call.ranks.nproc_per_node == "2"


def launched_with(tmp_path, *flags: str) -> DoremiOptions:
    tmp_path.mkdir(exist_ok=True)
    write_everything(tmp_path)
    launched = Launcher(tmp_path)("baselines/doremi", "--", *flags)
    assert launched.status == 0, launched.errors
    (call,) = launched.calls
    assert isinstance(call.options, DoremiOptions)
    return call.options


def test_the_launcher_takes_a_reference_that_is_trained(tmp_path):
    given = launched_with(tmp_path, "--reference", "runs/other")
    assert (given.reference, given.reference_mixture) == (Path("runs/other"), None)


def test_the_launcher_takes_the_forks_rule_whole(tmp_path):
    assert recipe_of(launched_with(tmp_path, "--doremi-variant", "fork").rule) == RECIPES["fork"]
    assert recipe_of(launched_with(tmp_path / "2").rule) == RECIPES["original"]
