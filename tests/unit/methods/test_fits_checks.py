"""What RegMix and Data Mixing Laws refuse, warn of and tell alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, DomainSplit, Mixture, MixtureWarning
from megatron_chameleon.corpus.indexed import IndexedWriter
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.changed_flags import changed_flags
from megatron_chameleon.methods.fits.mixing_laws import compute_mixing_laws
from megatron_chameleon.methods.fits.regmix import compute_regmix
from megatron_chameleon.methods.fits.target import check_target, tell_of_scales
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.regmix import RegmixOptions, TreeOptions
from megatron_chameleon.options.fits import DrawOptions, FitOptions
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.swarm import SwarmOptions
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.fit_runs import SWARM, drawn_runs, make_options

QUICK: dict[type[FitOptions], dict[str, Any]] = {
    RegmixOptions: {"trees": TreeOptions(num_trees=10, num_draws=200, num_best=10)},
    MixingLawsOptions: {"laws": LawOptions(num_starts=2)},
}
COMPUTE: dict[type[FitOptions], Callable[[Any], bool]] = {
    RegmixOptions: compute_regmix,
    MixingLawsOptions: compute_mixing_laws,
}
METHODS = [RegmixOptions, MixingLawsOptions]


def falling(mixtures):
    """Losses [n, 3] that fall with a domain's own share."""
    return 3 - mixtures


@pytest.fixture
def compute(corpus, tmp_path):
    """``compute(method, runs, corpus=..., **changes)``: the mixture that it writes."""

    def run(method, given=None, on=corpus, **changes):
        asked = make_options(method, on, tmp_path, given, {**QUICK[method], **changes})
        assert COMPUTE[method](asked)
        return Mixture.load(asked.output)

    return run


def without_held_out_text(root: Path, *names: str) -> Corpus:
    """A corpus whose domains ``names`` have empty valid splits."""
    corpus = write_small_corpus(root)
    domains = dict(corpus.domains)
    for name in names:
        prefix = root / "valid" / name
        for suffix in (".bin", ".idx"):
            prefix.with_name(prefix.name + suffix).unlink()
        digest = IndexedWriter(prefix, "uint16").finish()
        empty = DomainSplit(f"valid/{name}", 0, 0, 0, digest)
        domains[name] = dataclasses.replace(domains[name], valid=empty)
    dataclasses.replace(corpus, domains=domains).save()
    return Corpus.load(root)


@pytest.mark.parametrize("method", METHODS)
def test_a_target_without_held_out_text_is_refused_before_anything_is_trained(
    compute, tmp_path, method
):
    corpus = without_held_out_text(tmp_path / "corpus", "poems")
    said = r"--target news,poems: 'poems' of .* has no held-out text, so its loss is not measured; "
    with pytest.raises(UserError, match=said + r"name others \(news, code\), or preprocess again"):
        compute(method, on=corpus, target="news,poems", num_proxies=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_corpus_without_any_held_out_text_is_refused_before_anything_is_trained(
    compute, tmp_path, method
):
    corpus = without_held_out_text(tmp_path / "corpus", *DOMAINS)
    with pytest.raises(UserError, match="has nothing in its valid split to measure proxies on"):
        compute(method, on=corpus, num_proxies=16)
    assert not (tmp_path / "out").exists()


def test_a_domain_without_held_out_text_can_be_weighed_for_the_others(tmp_path):
    corpus = without_held_out_text(tmp_path / "corpus", "poems")
    check_target("news,code", corpus)
    check_target(None, corpus)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_proxies": 30}, "--num-proxies 30"),
        ({"work_dir": Path("proxies")}, "--work-dir proxies"),
        ({"draws": DrawOptions(mixture_seed=7)}, "--mixture-seed 7"),
        ({"swarm": SwarmOptions(train_iters=9)}, "--train-iters 9"),
        (
            {"swarm": SwarmOptions(stopping=StoppingOptions(exit_duration_in_mins=5.0))},
            "--exit-duration-in-mins 5.0",
        ),
    ],
)
def test_options_of_a_training_beside_runs_that_are_there_are_refused(
    compute, tmp_path, method, changes, flag
):
    said = f"{flag}: the runs of --ratios .* are there, and nothing is trained; leave it out"
    with pytest.raises(UserError, match=said):
        compute(method, drawn_runs(falling, 20), **changes)
    assert not (tmp_path / "out").exists()


def test_flags_are_those_that_are_not_as_usual():
    given = dataclasses.replace(SWARM, stopping=StoppingOptions(1.0))
    assert list(changed_flags(SwarmOptions(), SwarmOptions())) == []
    assert dict(changed_flags(given, SWARM)) == {"--exit-duration-in-mins": 1.0}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (Path("/dev/null/mixture.json"), "/dev/null cannot be written to; choose another folder"),
        (Path("mixture"), "--output mixture: give a name that ends with .json"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_trained(
    compute, tmp_path, method, output, said
):
    with pytest.raises(UserError, match=said):
        compute(method, output=output, num_proxies=16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_corpus_of_one_domain_is_refused(compute, tmp_path, method):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="there is one domain, and nothing to weigh; add another"):
        compute(method, on=alone)
    assert not (tmp_path / "out").exists()


def test_columns_that_are_called_otherwise_here_are_told(compute, tmp_path, capsys):
    given = drawn_runs(falling, 20)
    rows = [f"x{n},{c},{a},{p}\n" for n, (a, c, p) in enumerate(given.mixtures)]
    (tmp_path / "r.csv").write_text("run,Code,train_news,poems\n" + "".join(rows))
    rows = [f"x{n},{a},0.5\n" for n, (a, _c, _p) in enumerate(given.losses)]
    (tmp_path / "m.csv").write_text("run,metric/news_val_loss,arc_bpb\n" + "".join(rows))
    tables = {"ratios": tmp_path / "r.csv", "metrics": tmp_path / "m.csv"}
    mixture = compute(RegmixOptions, target="news", **tables)
    assert mixture.parameters["renamed_columns"] == {
        "ratios": {"Code": "code", "train_news": "news"},
        "metrics": {"metric/news_val_loss": "news"},
    }
    said = capsys.readouterr().out
    assert f"columns of {tables['ratios']}: Code is code, train_news is news\n" in said
    assert f"columns of {tables['metrics']}: metric/news_val_loss is news\n" in said


def beside(given, name, values):
    """The runs with another metric."""
    losses = np.column_stack([given.losses, values])
    return dataclasses.replace(given, metrics=[*given.metrics, name], losses=losses)


def test_metrics_of_other_sizes_in_one_target_are_warned_of(recwarn):
    given = drawn_runs(falling, 20)
    accuracies = np.random.default_rng(0).uniform(0.2, 0.4, 20)
    mixed = beside(given, "accuracy", accuracies)
    with pytest.warns(MixtureWarning, match=r"m.csv: .* from accuracy \(about 0\.3\d+\) to \w+ "):
        tell_of_scales(None, mixed, "m.csv")
    with pytest.warns(MixtureWarning, match="made small, accuracies too; say what is meant by"):
        tell_of_scales("news,accuracy", mixed, "m.csv")
    with pytest.warns(MixtureWarning, match=r"to _step \(about 1e\+03\)"):
        tell_of_scales(None, beside(given, "_step", np.full(20, 1000.0)), "m.csv")
    recwarn.clear()
    tell_of_scales(None, given, "m.csv")
    tell_of_scales("news,code", mixed, "m.csv")  # the others are in no target
    tell_of_scales("news=1,accuracy=10", mixed, "m.csv")  # said on purpose
    assert not recwarn.list


def test_a_persons_metrics_are_looked_at(compute):
    mixed = beside(drawn_runs(falling, 20), "step", np.full(20, 1000.0))
    with pytest.warns(MixtureWarning, match="metrics of very different sizes, from"):
        compute(RegmixOptions, mixed)
