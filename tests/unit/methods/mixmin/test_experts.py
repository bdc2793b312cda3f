"""MixMin with trained models, from a corpus to a mixture."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Mixture, TrainingRun
from megatron_chameleon.checkpoint.open_model import open_model
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.methods.mixmin import EstimateOptions, ExpertOptions, MixminOptions
from megatron_chameleon.methods.mixmin.compute import compute_mixture
from megatron_chameleon.methods.mixmin.experts import expert_probabilities
from megatron_chameleon.methods.mixmin.text import Blocks
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.options import OptimizerOptions, StoppingOptions
from tests.small_corpus import DOMAINS, with_text

TRAINING = ProxyOptions(
    seq_length=32,
    train_iters=16,
    global_batch_size=8,
    micro_batch_size=8,
    optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
)


def options_for(corpus, output, **changes) -> MixminOptions:
    settings = {
        "corpus": corpus.root,
        "output": output,
        "target": "poems=3,news=1",
        "experts": ("nano",),
        "training": TRAINING,
        "estimate": EstimateOptions(bootstrap_resamples=10),
    }
    return MixminOptions(**{**settings, **changes})


@pytest.fixture(scope="module")
def copy(corpus, tmp_path_factory) -> Corpus:
    """A copy of the corpus with a tokenizer."""
    folder = tmp_path_factory.mktemp("experts") / "corpus"
    return with_text(corpus, folder, "poems", "valid")[0]


@pytest.fixture(scope="module")
def trained(copy, tmp_path_factory) -> MixminOptions:
    """Options of a finished mixture; its experts are for reading only."""
    options = options_for(copy, tmp_path_factory.mktemp("trained") / "mixture.json")
    assert compute_mixture(options)
    return options


def experts_of(options):
    return tuple(f"{name}={options.runs_folder / name / 'run'}" for name in DOMAINS)


def test_weights_are_the_shares_of_the_target(trained):
    mixture = Mixture.load(trained.output)
    assert mixture.parameters["written"] == "estimate"
    assert mixture.weights["poems"] == pytest.approx(0.75, abs=0.1)
    assert mixture.weights["news"] == pytest.approx(0.25, abs=0.1)
    runs = [TrainingRun.load(trained.runs_folder / name / "run") for name in DOMAINS]
    assert [run.domain_tokens.keys() for run in runs] == [{name} for name in DOMAINS]
    assert mixture.parameters["total_cost"]["flops"] > sum(run.cost.flops for run in runs) > 0
    assert mixture.cost.flops > 0


def test_probabilities_are_those_of_evaluate_perplexity(trained, tmp_path):
    corpus = Corpus.load(trained.corpus)
    model = open_model(trained.runs_folder / "code" / "run")
    options = PerplexityOptions(
        corpus=trained.corpus,
        checkpoint=model.where,
        output=tmp_path / "result.json",
        split="valid",
        packing="documents",
        window_length=32,
    )
    (result,) = evaluate_perplexities([options])
    file = open_domains(corpus).open("news", "valid")
    lengths = file.lengths.astype(np.int64)
    documents = np.repeat(np.arange(len(file)), lengths)
    block = Blocks(file.tokens[:].astype(np.int64), documents, np.ones(len(documents)), lengths)
    with distributed(ParallelOptions(), seed=0) as layout:
        found, flops = expert_probabilities(
            {"code": model, "again": model}, [block], 32, corpus.tokenizer.eod_id, layout
        )
    assert found.shape == (len(documents), 2)
    assert flops > 0
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    sums = np.bincount(documents, -np.log(found[:, 0]))
    clusters = result.domains["news"].clusters
    assert clusters is not None
    np.testing.assert_allclose(sums, clusters.losses, rtol=1e-6)
    # Tokens are predicted from the tokens before them in their document, and from no others.
    kept = documents < 2
    cut = Blocks(block.tokens[kept], documents[kept], block.weights[kept], lengths[:2])
    with distributed(ParallelOptions(), seed=0) as layout:
        first, _ = expert_probabilities({"code": model}, [cut], 32, corpus.tokenizer.eod_id, layout)
    np.testing.assert_allclose(first[:, 0], found[: len(first), 0], rtol=1e-5)


def test_existing_models_give_the_same_mixture(trained, tmp_path):
    passed = options_for(
        Corpus.load(trained.corpus),
        tmp_path / "mixture.json",
        experts=experts_of(trained),
        training=ProxyOptions(),
    )
    assert compute_mixture(passed)
    mixture = Mixture.load(passed.output)
    assert mixture.weights == Mixture.load(trained.output).weights
    assert mixture.parameters["paper_flops"] == 0
    assert not passed.runs_folder.exists()


def test_no_expert_is_trained_if_no_gain_is_predicted(copy, trained, tmp_path, capsys):
    prior = tmp_path / "prior.json"
    assert compute_mixture(options_for(copy, prior, experts=("ngram",), training=ProxyOptions()))
    options = options_for(
        copy, tmp_path / "mixture.json", estimate=EstimateOptions(prior=str(prior))
    )
    assert compute_mixture(options)
    mixture = Mixture.load(options.output)
    assert mixture.weights == pytest.approx(Mixture.load(prior).weights)
    assert (mixture.parameters["written"], mixture.parameters["experts"]) == ("prior", "ngram")
    assert "no expert was trained" in capsys.readouterr().out
    assert not options.runs_folder.exists()
    # Finished models only run forward passes, so they are used without a predicted gain.
    assert compute_mixture(dataclasses.replace(options, work_dir=trained.runs_folder))
    assert Mixture.load(options.output).parameters["experts"] == "nano"


def test_an_added_domain_trains_one_expert(copy, tmp_path):
    fewer = dataclasses.replace(
        copy, root=tmp_path / "fewer", domains={n: copy.domains[n] for n in ("news", "code")}
    )
    shutil.copytree(copy.root, fewer.root)
    fewer.save()
    folder = {"work_dir": tmp_path / "experts"}
    estimate = EstimateOptions(bootstrap_resamples=10, accept_uncertain=True)
    options = options_for(
        copy, tmp_path / "mixture.json", target="news", estimate=estimate, **folder
    )
    assert compute_mixture(dataclasses.replace(options, corpus=fewer.root))

    def files():
        found = (tmp_path / "experts").glob("*/run/*/step-*/*")
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    assert compute_mixture(dataclasses.replace(options, target="poems"))
    after = files()
    assert before.items() < after.items()
    assert {path.parts[-5] for path in after.keys() - before.keys()} == {"poems"}
    # The text of a domain has changed.
    changed = dataclasses.replace(
        copy, root=tmp_path / "changed", domains={**copy.domains, "news": copy.domains["code"]}
    )
    shutil.copytree(copy.root, changed.root)
    changed.save()
    with pytest.raises(UserError, match=r"news.*other text"):
        compute_mixture(dataclasses.replace(options, corpus=changed.root, target="poems"))


def test_a_stopped_command_resumes(trained, tmp_path):
    options = options_for(Corpus.load(trained.corpus), tmp_path / "mixture.json")
    now = dataclasses.replace(TRAINING, stopping=StoppingOptions(exit_duration_in_mins=1e-6))
    assert not compute_mixture(dataclasses.replace(options, training=now))
    assert not options.output.exists()
    assert compute_mixture(options)
    assert Mixture.load(options.output).weights == Mixture.load(trained.output).weights


def test_mistakes_are_one_line(trained, copy, corpus, tmp_path):
    output = tmp_path / "mixture.json"

    def error_of(corpus=copy, **changes):
        with pytest.raises(UserError) as caught:
            compute_mixture(options_for(corpus, output, **changes))
        return str(caught.value)

    plain = {"training": ProxyOptions()}
    one, *others = experts_of(trained)
    assert "'news' too" in error_of(experts=tuple(others), **plain)
    assert "named twice" in error_of(experts=(one, one, *others), **plain)
    assert "no domain 'sport'" in error_of(experts=("sport=x", *others), **plain)
    assert "no such folder" in error_of(experts=("news=x", *others), **plain)
    assert "one model name" in error_of(experts=("nano", "60m"))
    assert "nano-ish" in error_of(experts=("nano-ish",))
    assert "the model is --experts" in error_of(training=dataclasses.replace(TRAINING, model="60m"))
    assert "trains nothing" in error_of(experts=(one, *others))
    assert "--ngram-order" in error_of(models=ExpertOptions(ngram_order=2))
    assert "another tokenizer" in error_of(corpus, experts=(one, *others), **plain)
    assert not list(tmp_path.iterdir())
