"""Texts of --target in methods that train proxies: DoGE, and the fits of a swarm."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning
from megatron_chameleon.artifacts.swarm import finished_members
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.options import ImportOptions, SourceOptions
from megatron_chameleon.corpus.target import parse_target
from megatron_chameleon.corpus.target_corpus import FOLDER_NAME, corpus_with_texts
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.doge import DogeOptions, DogeRuleOptions
from megatron_chameleon.methods.doge.compute import Doge, held_out_mix
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.mixing_laws.compute import MixingLawsFit
from megatron_chameleon.methods.options import PriorOptions, ProxyOptions
from megatron_chameleon.methods.swarm import MixtureSamplingOptions
from megatron_chameleon.training.options import OptimizerOptions
from tests.small_corpus import with_text, write_small_corpus
from tests.unit.methods.swarm.small_swarm import SWARM

STEPS = SWARM.train_iters
TRAIN = PriorOptions(accept_uncertain=True)
PROXY = ProxyOptions(
    model="nano",
    seq_length=32,
    train_iters=STEPS,
    global_batch_size=6,
    micro_batch_size=2,
    log_interval=1,
    optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=1),
)


class Inputs(NamedTuple):
    """A corpus without the domain poems, its text, and a corpus in which poems is held out."""

    without: Path
    text: Path
    held_out: Path


@pytest.fixture(scope="module")
def read_only(tmp_path_factory) -> Inputs:
    root = tmp_path_factory.mktemp("target-text")
    names = ("news", "code", "maths", "poems")
    corpus = write_small_corpus(root / "small", names)
    copy, text = with_text(corpus, root / "copy", "poems", "valid")
    held_out, without = root / "held-out", root / "without"
    import_corpus(ImportOptions(held_out, corpus=copy.root, held_out="poems"))
    shutil.copytree(held_out, without)
    dataclasses.replace(Corpus.load(held_out), root=without, held_out={}).save()
    return Inputs(without, text, held_out)


@pytest.fixture
def inputs(read_only, tmp_path) -> Inputs:
    """The inputs, with a text that a test may change."""
    return read_only._replace(text=Path(shutil.copy2(read_only.text, tmp_path / "poems.jsonl")))


def settings_for(target: str) -> dict[str, Any]:
    """The text key is an error for targets without texts."""
    return {"fallback": TRAIN} | ({"target_text_key": "words"} if ".jsonl" in target else {})


def doge(corpus: Path, target: str, output: Path, **changes: Any) -> DogeOptions:
    settings = settings_for(target) | {"proxy": PROXY, "rule": DogeRuleOptions(doge_mu=0.2)}
    settings |= changes
    return DogeOptions(corpus=corpus, target=target, output=output, **settings)


def mixing_laws(corpus: Path, target: str, output: Path, **changes: Any) -> MixingLawsOptions:
    sampling, laws = MixtureSamplingOptions(smallest_weight=0.05), LawOptions(num_starts=2)
    settings = settings_for(target) | {"corpus": corpus, "target": target, "output": output}
    settings |= {"num_proxies": 4, "sampling": sampling, "swarm": SWARM, "laws": laws}
    return MixingLawsOptions(**settings | changes)


def compute(options: DogeOptions | MixingLawsOptions) -> Mixture:
    if isinstance(options, DogeOptions):
        assert Doge.compute(options)
    else:
        assert MixingLawsFit(options).compute()
    return Mixture.load(options.output)


def test_the_gain_is_predicted_for_a_text(inputs, tmp_path):
    target, output = f"mine={inputs.text}", tmp_path / "mixture.json"
    # The text has too few documents for a certain gain.
    mixture = compute(mixing_laws(inputs.without, target, output, fallback=PriorOptions()))
    assert mixture.parameters["written"] == "prior"
    assert mixture.parameters["target"] == {"value": target, "shares": {"mine": 1.0}}
    assert mixture.parameters["headroom"]["target"]["shares"] == {"mine": 1.0}
    assert mixture.provenance is not None
    assert "target text" in mixture.provenance.inputs


@pytest.mark.parametrize("options", [doge, mixing_laws])
@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_a_text_is_a_held_out_domain(options, inputs, tmp_path, capsys):
    by_name = compute(options(inputs.held_out, "poems", tmp_path / "by-name.json"))
    target, output = f"poems={inputs.text}", tmp_path / "by-text.json"
    by_text = compute(options(inputs.without, target, output))
    assert by_text.weights == by_name.weights
    assert by_text.parameters["target"] == {"value": target, "shares": {"poems": 1.0}}
    assert by_text.provenance is not None
    found = by_text.provenance.inputs
    assert found["corpus"] == Corpus.load(inputs.without).hash
    work = output.with_suffix("")
    corpus = Corpus.load(work / FOLDER_NAME)
    assert list(corpus.held_out) == ["poems"]
    assert corpus.provenance.inputs["target text"] == found["target text"]
    # The same command trains nothing, and so does a command with a moved file of the same text.
    capsys.readouterr()
    os.utime(inputs.text, ns=(1, 1))
    before = sorted(work.rglob("*.bin"))
    assert compute(options(inputs.without, target, output)).weights == by_text.weights
    assert sorted(work.rglob("*.bin")) == before
    if options is mixing_laws:
        assert "training 0 of 4 members" in capsys.readouterr().out
        # Another target of the same losses needs no training either.
        shared = compute(options(inputs.without, f"news,{target}=3", output))
        assert shared.parameters["target_shares"] == {
            "news": 0.25,
            "code": 0,
            "maths": 0,
            "poems": 0.75,
        }
        assert len(finished_members(work / "swarm-nano", 9)) == 4
    else:
        with pytest.raises(UserError, match="trained_on"):
            compute(options(inputs.without, f"news,{target}=3", output))
    # A changed text is an error, and leaves everything as it is.
    lines = inputs.text.read_text().splitlines()
    inputs.text.write_text("\n".join(reversed(lines)))
    with pytest.raises(UserError, match="another text of 'poems'"):
        compute(options(inputs.without, target, output))
    assert Corpus.load(work / FOLDER_NAME).hash == corpus.hash
    assert Mixture.load(output).provenance is not None
    inputs.text.write_text("\n".join(lines))
    assert compute(options(inputs.without, target, output)).weights == by_text.weights


def test_doge_aligns_with_held_out_text_of_all_domains_of_a_target(inputs, tmp_path):
    """A target of both kinds is read from valid text, in proportion to the shares."""
    target = f"news=3,poems={inputs.text}"
    method = Doge(doge(inputs.without, target, tmp_path / "mixture.json"))
    assert method.mix is not None
    assert method.mix.names == ["news", "poems"]
    assert method.roles.train == (1, 2)
    assert method.roles.target == (3,)
    shares = {"news": 0.75, "poems": 0.25}
    samples = held_out_mix(method.plan, method.mix, 4, shares)
    domains = samples.batch(range(4 * STEPS))["domain"].tolist()
    assert [domains.count(number) for number in (0, 1)] == [3 * STEPS, STEPS]
    trained = Doge(doge(inputs.without, target, tmp_path / "all.json", train_on_target=True))
    assert trained.roles.train == (0, 1, 2)
    hook = trained.make_hook(trained.plan, None)
    assert hook.settings["target_shares"] == shares
    assert hook.settings["target_domains"] == ["news", "poems"]


def test_shares_of_trained_domains_weigh_their_gradients(inputs, tmp_path):
    options = doge(inputs.held_out, "news=3,code=1", tmp_path / "x.json", train_on_target=True)
    assert Doge(options).roles.target_factors == (1.5, 0.5)
    options = doge(inputs.held_out, "news=2,code=2", tmp_path / "x.json", train_on_target=True)
    assert Doge(options).roles.target_factors == ()


def test_unusable_texts_are_errors(inputs, tmp_path):
    empty, output = tmp_path / "empty.jsonl", tmp_path / "mixture.json"
    empty.write_text('{"words": ""}\n')
    for options in (doge, mixing_laws):
        for value in (f"mine={empty}", "mine"):
            with pytest.raises(UserError, match="mine"):
                compute(options(inputs.without, value, output))
    mixtures, names = np.random.default_rng(0).dirichlet(np.ones(3), 5), ["news", "code", "maths"]
    runs = MixtureRuns([*"abcde"], names, mixtures, names, 2 + mixtures)
    tables = {"ratios": tmp_path / "r.csv", "metrics": tmp_path / "m.csv"}
    write_mixture_runs(runs, **tables)
    with pytest.raises(UserError, match="'mine'"):
        compute(
            MixingLawsOptions(
                corpus=inputs.without, output=output, target=f"mine={inputs.text}", **tables
            )
        )
    assert not output.exists()


def test_a_text_key_without_a_text_is_an_error(inputs, tmp_path):
    for options in (doge, mixing_laws):
        with pytest.raises(UserError, match="--target-text-key words"):
            compute(options(inputs.held_out, "poems", tmp_path / "x.json", target_text_key="words"))


def test_a_text_in_the_training_text_is_reported(inputs, tmp_path, capsys):
    corpus = Corpus.load(inputs.without)
    source = SourceOptions((), text_key="words")
    _, leaked = with_text(corpus, tmp_path / "copy", "code", "train")
    both = f"poems={inputs.text},mine={leaked}"
    target = parse_target(both, corpus.names, source)
    with pytest.warns(MixtureWarning, match="of 'mine' are in the training text of 'code'") as all_:
        made = corpus_with_texts(corpus, target, source, tmp_path / "made")
    assert len(all_) == 1
    assert "'poems': 4 documents" in capsys.readouterr().out
    # The order of texts has no effect, but another set of texts is an error.
    swapped = parse_target(f"mine={leaked},poems={inputs.text}", corpus.names, source)
    with pytest.warns(MixtureWarning):
        assert corpus_with_texts(corpus, swapped, source, tmp_path / "made").hash == made.hash
    alone = parse_target(f"poems={inputs.text}", corpus.names, source)
    with pytest.raises(UserError, match="other texts"):
        corpus_with_texts(corpus, alone, source, tmp_path / "made")
    other = write_small_corpus(tmp_path / "other", ("news", "code", "maths"), seed=1)
    copy, _ = with_text(other, tmp_path / "other-copy", "news", "valid")
    with pytest.raises(UserError, match="another --corpus"):
        corpus_with_texts(copy, alone, source, tmp_path / "made")
