"""tools/sweep_mixture.py --method doge: a proxy a point, each counted once."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.artifacts import Sweep, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.sweeps.doge import files_of
from megatron_chameleon.methods.sweeps.points import size_and_steps
from megatron_chameleon.methods.sweeps.sweep import sweep_mixture
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.mixture import ExtractionOptions
from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from tests.small_corpus import DOMAINS
from tests.unit.methods.test_method_doge import doge_options


@pytest.fixture
def options(corpus, tmp_path):
    """``options(**changes)``: proxies of three and four steps."""

    def make(**changes) -> SweepOptions:
        proxy = dataclasses.replace(
            doge_options(corpus, tmp_path / "doge.json").proxy, train_iters=3
        )
        settings = {
            "axes": AxisOptions(sweep_train_iters=(3, 4)),
            "proxy": proxy,
            "doge": DogeRule(doge_mu=0.3),
            **changes,
        }
        return SweepOptions(corpus=corpus.root, output=tmp_path / "run", method="doge", **settings)

    return make


def test_a_sweep_trains_a_proxy_a_point_and_goes_on(options, tmp_path, capsys):
    sweep = sweep_mixture(options())
    assert sweep is not None
    assert sweep.axes == {"train_iters": [3, 4]}
    mixtures = [sweep.load_mixture(point) for point in sweep.points]
    assert all(list(mixture.weights) == list(DOMAINS) for mixture in mixtures)
    assert mixtures[0].weights != mixtures[1].weights
    assert {mixture.parameters["rule"]["mu"] for mixture in mixtures} == {0.3}
    folders = [folder for point in sweep.points for folder in point.made_from]
    runs = [TrainingRun.load(tmp_path / "run" / folder) for folder in folders]
    assert [run.train_iters for run in runs] == [3, 4]
    assert sweep.cost.flops == sum(run.cost.flops for run in runs)
    capsys.readouterr()
    assert sweep_mixture(options()) == Sweep.load(tmp_path / "run")
    assert capsys.readouterr().out.count("nothing to do") == 2
    with pytest.raises(
        UserError, match="--seq-length 32, not 16; give another --output, or delete"
    ):
        sweep_mixture(options(proxy=dataclasses.replace(options().proxy, seq_length=16)))


def test_another_rule_has_proxies_of_its_own(options):
    """The paper's, given or not, has a name without a digest."""
    rules = (DogeRule(), DogeRule(0.3), DogeRule(0.3, doge_eps=0.1), DogeRule(0.01))
    given = [options(doge=rule) for rule in rules]
    names = [files_of(each, size_and_steps(each)).mixture.stem for each in given]
    assert names[0] == names[3] == "doge-nano-3steps-seed3"
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "finetune"}, "--mode finetune: DoGE has no weights of that kind"),
        ({"extraction": ExtractionOptions(num_windows=8)}, "--num-windows 8: --method doge has no"),
        ({"axes": AxisOptions(sweep_ridge=(1.0,))}, "--sweep-ridge: doge has no such knob"),
        ({"doge": DogeRule(doge_mu=-1.0)}, "--doge-mu is -1.0"),
    ],
)
def test_what_has_no_meaning_for_it_is_refused(options, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        sweep_mixture(options(**changes))
    assert not (tmp_path / "run").exists()
