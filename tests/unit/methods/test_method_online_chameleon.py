"""--online-interval: the mixture follows the model's own embeddings while it is trained."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EmbeddingStore,
    Mixture,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.checkpoint.state import random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.methods.leverage.online import OnlineChameleon, largest_moves
from megatron_chameleon.mixture import DegenerateScoreWarning
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.options.data import DataOptions
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.online import OnlineOptions
from megatron_chameleon.training import pretrain as pretrain_module
from megatron_chameleon.training.pretrain import pretrain
from megatron_chameleon.training.stopping import StopRequests
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus
from tests.unit.training.bad_steps import before_steps
from tools import pretrain_gpt

WINDOWS, SEED = 12, 5
ROUNDING = 1e-6
EPOCH = DataOptions(permutation="epoch")
ONLINE = OnlineOptions(
    online_interval=3, online_windows=WINDOWS, online_recipe="scaled", online_smoothing=0.0
)


@pytest.fixture
def options(pretrain_options, tmp_path):
    """``options(**changes)``: six steps, with a checkpoint and new weights after three."""

    def make(name="run", **changes):
        settings = {"seed": SEED, "data": EPOCH, "online": ONLINE, "log_interval": 1, **changes}
        return pretrain_options(tmp_path / name, **settings)

    return make


@pytest.fixture
def weighed(corpus, tmp_path):
    """``weighed(checkpoint, **changes)``: the mixture of tools/compute_mixture.py, and its cost."""

    def weigh(checkpoint, **changes):
        extraction = ExtractionOptions(num_windows=WINDOWS, extraction_seed=SEED, **changes)
        given = ChameleonOptions(
            corpus=corpus.root,
            checkpoint=checkpoint,
            output=tmp_path / "weighed" / "mixture.json",
            extraction=extraction,
            weighting=RecipeOptions("scaled", bootstrap_resamples=2),
        )
        compute_mixture(given)
        store = EmbeddingStore.load(given.output.parent / "embeddings")
        return Mixture.load(given.output).weights, store.cost.flops

    return weigh


def online(**changes):
    return dataclasses.replace(ONLINE, **changes)


def phases_of(run_dir):
    return [phase.weights for phase in TrainingRun.load(run_dir).mixture_phases]


def figures_of(run_dir):
    return [
        (line["loss"], line["grad_norm"], line["domain_tokens_drawn"], line.get("hook"))
        for line in TrainingRun.load(run_dir).metrics()
    ]


@pytest.mark.parametrize("changes", [{}, {"online_layer": 1}])
def test_weights_are_those_that_the_tool_finds_for_that_steps_checkpoint(
    options, weighed, changes, capsys
):
    given = options(online=online(**changes))
    pretrain(given, OnlineChameleon)
    expected, _ = weighed(step_folder(given.run_dir, 3), layer=changes.get("online_layer"))
    first, second = phases_of(given.run_dir)
    assert first == dict.fromkeys(DOMAINS, 1 / 3)
    assert second == pytest.approx(expected, abs=ROUNDING)
    assert max(second.values()) - min(second.values()) > 0.01
    hooks = [line["hook"] for line in TrainingRun.load(given.run_dir).metrics()]
    assert [hook["recomputed"] for hook in hooks] == [0, 0, 0, 1, 1, 1]
    assert hooks[-1]["weights"] == second
    said = capsys.readouterr().out
    assert f"mixture from step 3 on: {largest_moves(first, second)}; 36 windows embedded" in said


def test_smoothing_keeps_a_share_of_the_weights_in_use(options, weighed, tmp_path):
    Mixture(dict(zip(DOMAINS, [0.5, 0.3, 0.2], strict=True))).save(tmp_path / "begin.json")
    given = options(
        online=online(online_interval=2, online_smoothing=0.75),
        mixture=str(tmp_path / "begin.json"),
        save_interval=2,
    )
    pretrain(given, OnlineChameleon)
    phases = phases_of(given.run_dir)
    assert len(phases) == 3
    for step, before, after in zip((2, 4), phases, phases[1:], strict=False):
        found, _ = weighed(step_folder(given.run_dir, step))
        smoothed = {name: 0.75 * before[name] + 0.25 * found[name] for name in DOMAINS}
        assert after == pytest.approx(smoothed, abs=2 * ROUNDING)
        (tmp_path / "weighed" / "embeddings" / "store.json").unlink()


def test_what_it_costs_is_counted_and_timed(options, weighed):
    """As often as it is done, as much as the tool's store says that the windows cost."""
    given, plain = (
        options(online=online(online_interval=2)),
        options("plain", online=OnlineOptions()),
    )
    pretrain(given, OnlineChameleon)
    pretrain(plain)
    _, flops = weighed(given.run_dir)
    extra = (TrainingRun.load(d).cost.flops for d in (given.run_dir, plain.run_dir))
    assert next(extra) - next(extra) == pytest.approx(2 * flops)
    phases = [line["phase_seconds"] for line in TrainingRun.load(given.run_dir).metrics()]
    assert [p.get("mixture", 0) > 0 for p in phases] == [False, False, True, False, True, False]


class OnlyReads(OnlineChameleon):
    """Finds weights and does not use them."""

    def new_mixture(self, step, model):
        before = random_states()
        assert super().new_mixture(step, model)
        for name, state in random_states().items():
            torch.testing.assert_close(state, before[name], rtol=0, atol=0)
        assert all(module.training for chunk in model for module in chunk.modules())
        assert all(buffer.grad_data.eq(0).all() for chunk in model for buffer in chunk.buffers)


@pytest.mark.parametrize("bf16", [False, True])
def test_reading_the_model_leaves_no_trace_in_it(options, bf16):
    read = options(bf16=bf16)
    plain = options("plain", bf16=bf16, online=OnlineOptions())
    pretrain(read, OnlyReads)
    pretrain(plain)
    assert [f[:3] for f in figures_of(read.run_dir)] == [f[:3] for f in figures_of(plain.run_dir)]
    assert figures_of(read.run_dir)[-1][3]["recomputed"] == 1


@pytest.mark.parametrize(("stop_in", "killed"), [(5, True), (4, False)])
def test_a_run_that_is_continued_is_the_one_that_was_not_interrupted(
    options, monkeypatch, stop_in, killed
):
    """Killed between new weights and a checkpoint, or stopped where both fall on one step."""

    def leave(_model):
        if killed:
            raise RuntimeError("killed")
        os.kill(os.getpid(), signal.SIGTERM)

    settings = {"online": online(online_interval=2, online_smoothing=0.3)}
    whole, parts = options("whole", **settings), options("parts", **settings)
    pretrain(whole, OnlineChameleon)
    with monkeypatch.context() as patched:
        before_steps(patched, {stop_in: leave})
        if killed:
            with pytest.raises(RuntimeError, match="killed"):
                pretrain(parts, OnlineChameleon)
        else:
            pretrain(parts, OnlineChameleon)
    pretrain(parts, OnlineChameleon)
    assert figures_of(parts.run_dir) == figures_of(whole.run_dir)
    assert phases_of(parts.run_dir) == phases_of(whole.run_dir)
    states = [CheckpointRecord.load(step_folder(o.run_dir, 6)).hook for o in (whole, parts)]
    assert states[0] == states[1]
    assert states[0] is not None
    assert states[0].state["recomputed"] == 2


def test_what_lies_ahead_may_be_other_than_planned_but_not_without(options, monkeypatch):
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(options(), OnlineChameleon)
    with pytest.raises(UserError, match="by a run of OnlineChameleon, not of plain training"):
        pretrain(options(online=OnlineOptions()))
    given = options(online=online(online_interval=5, online_recipe="reference"))
    pretrain(given, OnlineChameleon)
    starts = [phase.first_sample for phase in TrainingRun.load(given.run_dir).mixture_phases]
    assert starts == [0, 3 * 8, 5 * 8]


def test_hidden_states_that_are_no_numbers_change_nothing(options, monkeypatch):
    def spoil(model):
        def hook(module, _inputs, output):
            return output if module.training else (output[0] * math.nan, *output[1:])

        unwrap(model[0]).decoder.layers[0].register_forward_hook(hook)

    given = options(online=online(online_interval=2))
    before_steps(monkeypatch, {4: spoil})
    with pytest.warns(MixtureWarning, match="as it is at step 4: hidden states of 'news'"):
        pretrain(given, OnlineChameleon)
    run = TrainingRun.load(given.run_dir)
    assert (run.status, run.skipped_steps) == ("finished", 0)
    assert [line["hook"]["recomputed"] for line in run.metrics()] == [0, 0, 1, 1, 1, 1]
    assert len(run.mixture_phases) == 2


def test_a_domain_without_a_weight_stays_without_and_needs_no_text(options, tmp_path):
    """An empty one that has a weight from the beginning is refused as in any run."""
    root = tmp_path / "corpus"
    empty_domain(write_small_corpus(root, (*DOMAINS, "empty")), "empty")
    mixture = dict(zip((*DOMAINS, "empty"), [0.2, 0.3, 0.5, 0.0], strict=True))
    Mixture(mixture).save(tmp_path / "three.json")
    given = options(corpus=root, mixture=str(tmp_path / "three.json"))
    pretrain(given, OnlineChameleon)
    weights = phases_of(given.run_dir)[1]
    assert weights.pop("empty") == 0
    assert all(weight > 0.05 for weight in weights.values())
    with pytest.raises(
        UserError, match=r"domain 'empty' of .* has 0 tokens to train on, fewer than"
    ):
        pretrain(options("other", corpus=root), OnlineChameleon)


def empty_domain(corpus, name):
    prefix = corpus.prefix(name, "train")
    Path(f"{prefix}.bin").write_bytes(b"")
    Path(f"{prefix}.idx").write_bytes(bytes(index_file_bytes(0)))
    domain = corpus.domains[name]
    empty = dataclasses.replace(domain.train, documents=0, tokens=0, block_checksums=None)
    domains = {**corpus.domains, name: dataclasses.replace(domain, train=empty)}
    dataclasses.replace(corpus, domains=domains).save()


def test_the_data_sets_of_a_data_path_are_embedded_too(options, corpus, tmp_path):
    prefixes = " ".join(f"{n + 1} {corpus.prefix(d, 'train')}" for n, d in enumerate(DOMAINS))
    data = dataclasses.replace(
        EPOCH, data_path=prefixes, tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json")
    )
    given = options(corpus=None, data=data)
    pretrain(given, OnlineChameleon)
    first, second = phases_of(given.run_dir)
    assert list(first.values()) == [1, 2, 3]
    assert sum(second.values()) == pytest.approx(1, abs=3 * ROUNDING)
    assert all(abs(weight - (n + 1) / 6) > 0.01 for n, weight in enumerate(second.values()))


def test_domains_that_are_all_alike_are_told_by_name_and_weigh_as_before(options, capsys):
    class AlikeDomains(OnlineChameleon):
        def _means(self, reader):
            return 0 * super()._means(reader)

    given = options()
    with pytest.warns(DegenerateScoreWarning, match="score of 'news', 'code', 'poems' is at a li"):
        pretrain(given, AlikeDomains)
    assert figures_of(given.run_dir)[-1][3]["recomputed"] == 1
    assert len(phases_of(given.run_dir)) == 1
    assert "mixture from step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"online": online(online_interval=0)}, "--online-interval 0: "),
        ({"online": online(online_interval=6)}, "--online-interval 6: give steps from 1 to 5"),
        ({"online": online(online_windows=0)}, "--online-windows 0: "),
        ({"online": online(online_smoothing=1.0)}, r"--online-smoothing 1\.0: "),
        ({"online": online(online_smoothing=math.nan)}, "--online-smoothing nan: "),
        ({"online": online(online_layer=5)}, "--online-layer 5: the model has layers 1 to 4"),
        ({"data": DataOptions()}, "give --permutation epoch"),
        (
            {"data": DataOptions(permutation="epoch", mixture_change=(("4=uniform",),))},
            "leave --mixture-change out",
        ),
        ({"mixture": "ALONE"}, "only 'code' of .* has a weight"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(options, tmp_path, changes, said):
    if "mixture" in changes:
        Mixture({"news": 0.0, "code": 1.0, "poems": 0.0}).save(tmp_path / "alone.json")
        changes = {"mixture": str(tmp_path / "alone.json")}
    given = options(**changes)
    with pytest.raises(UserError, match=said):
        pretrain(given, OnlineChameleon)
    assert not given.run_dir.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"online_windows": 3},
        {"online_layer": 1},
        {"online_recipe": "scaled"},
        {"online_smoothing": 0.0},
    ],
)
def test_options_that_would_do_nothing_are_refused(options, changes):
    flag = "--" + next(iter(changes)).replace("_", "-")
    with pytest.raises(UserError, match=f"{flag} .*: without --online-interval the mixture stays"):
        pretrain(options(online=OnlineOptions(**changes)))


@pytest.mark.parametrize("asked", [True, False])
def test_the_tool_has_the_run_watched_if_asked(options, monkeypatch, asked):
    calls = []
    monkeypatch.setattr(pretrain_module, "pretrain", lambda *a, **more: calls.append(more))
    monkeypatch.setattr(StopRequests, "take_signals", lambda _stops: None)
    pretrain_gpt.main(options() if asked else options(online=OnlineOptions()))
    (more,) = calls
    assert more.get("watched_by") is (OnlineChameleon if asked else None)


def test_the_three_largest_moves_are_told():
    before = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.3, "e": 0.1}
    after = {"a": 0.2, "b": 0.19, "c": 0.05, "d": 0.31, "e": 0.25}
    told = "c 0.3000 -> 0.0500, e 0.1000 -> 0.2500, a 0.1000 -> 0.2000, 2 more by less"
    assert largest_moves(before, after) == told
