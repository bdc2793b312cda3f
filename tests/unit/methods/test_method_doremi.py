"""tools/compute_mixture.py --method doremi: a reference, a proxy that is watched, and weights."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Mixture,
    MixtureWarning,
    Sweep,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import find_checkpoint, step_folder
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.doremi import METHOD, DoremiOptions
from megatron_chameleon.methods.excess_loss import compute as compute_module
from megatron_chameleon.methods.excess_loss import hook as hook_module
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.excess_loss.hook import ExcessLossReweighting
from megatron_chameleon.methods.excess_loss.plan import plan_doremi, recipe_of
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.methods.sweeps.doremi import files_of
from megatron_chameleon.methods.sweeps.points import size_and_steps
from megatron_chameleon.methods.sweeps.sweep import sweep_mixture
from megatron_chameleon.mixture.doremi import RECIPES
from megatron_chameleon.mixture.exponentiated import LOWEST_LOG
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.memory_advice import training_setup
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.mixture import ExtractionOptions
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from megatron_chameleon.options.training import DocumentBoundaryOptions, OptimizerOptions
from megatron_chameleon.training.global_batch import GlobalBatch
from tests.small_corpus import DOMAINS, EOD, VOCAB_SIZE, write_small_corpus
from tests.unit.launched import Launcher, write_everything
from tests.unit.training.bad_steps import before_steps, poison, run_out

STEPS = 6
SLOW = DoremiRule(doremi_eta=0.1)


def proxy_options(**changes) -> ProxyOptions:
    """Six steps of a nano model, as the fixture ``finished_run`` was trained."""
    settings = {
        "model_size": "nano",
        "seq_length": 32,
        "train_iters": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "log_interval": 1,
        "save_interval": 3,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
    }
    return ProxyOptions(**{**settings, **changes})


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(name, proxy, **changes)``: against a reference that is trained already."""

    def make(name="doremi", proxy=None, **changes) -> DoremiOptions:
        settings = {"corpus": corpus.root, "reference": finished_run, "rule": SLOW, **changes}
        return DoremiOptions(
            output=tmp_path / "4-mixture" / f"{name}.json",
            proxy=proxy_options(**(proxy or {})),
            **settings,
        )

    return make


@pytest.fixture(scope="module")
def found(corpus, finished_run, tmp_path_factory) -> Path:
    """A mixture with its proxy beside it, for reading only."""
    output = tmp_path_factory.mktemp("found") / "doremi.json"
    compute_doremi(
        DoremiOptions(
            corpus=corpus.root,
            output=output,
            reference=finished_run,
            rule=SLOW,
            proxy=proxy_options(),
        )
    )
    return output


@pytest.fixture
def half_done(found, tmp_path):
    """A copy of that proxy in the place of the one that ``options()`` trains."""
    return Path(shutil.copytree(found.with_suffix(""), tmp_path / "4-mixture" / "doremi"))


def proxy_of(output: Path) -> TrainingRun:
    return TrainingRun.load(output.with_suffix("") / "proxy")


def hook_lines(output: Path) -> list[dict]:
    return [line["hook"] for line in proxy_of(output).metrics()]


def figures_of(output: Path):
    lines = proxy_of(output).metrics()
    return [(line["loss"], line["grad_norm"], line["hook"]) for line in lines]


def state_of(output: Path, step=STEPS):
    record = CheckpointRecord.load(step_folder(output.with_suffix("") / "proxy", step))
    assert record.hook is not None
    return record.hook.state


def test_the_weights_are_the_mean_over_the_proxys_steps(found):
    mixture, lines = Mixture.load(found), hook_lines(found)
    steps = [dict.fromkeys(DOMAINS, 1 / 3), *(line["weights"] for line in lines)]
    assert len(steps) == STEPS + 1
    for name in DOMAINS:
        mean = np.mean([weights[name] for weights in steps])
        assert mixture.weights[name] == pytest.approx(mean)
        assert mixture.parameters["last_weights"][name] == pytest.approx(steps[-1][name])
        assert mixture.parameters["trajectory"]["weights"][name] == [
            line["weights"][name] for line in lines
        ]
    assert mixture.parameters["trajectory"]["steps"] == list(range(1, STEPS + 1))
    assert mixture.scores == lines[-1]["excess"]
    assert max(mixture.weights.values()) - min(mixture.weights.values()) > 1e-3
    low, high = mixture.parameters["range_in_second_half"]["news"]
    path = [line["weights"]["news"] for line in lines[STEPS // 2 :]]
    assert (low, high) == (min(path), max(path))


def test_every_step_follows_from_the_one_before_by_the_rule(found):
    """From what was logged, by the formula as it stands."""
    alpha = np.full(3, 1 / 3)
    for line in hook_lines(found):
        excess = np.array(list(line["excess"].values()))
        alpha = alpha * np.exp(0.1 * excess)
        alpha = 0.999 * alpha / alpha.sum() + 0.001 / 3
        np.testing.assert_allclose(list(line["weights"].values()), alpha, rtol=1e-12)


class Checked(ExcessLossReweighting):
    """Compares what is found with a loop over tokens, and the reference with its read-out."""

    steps, apart, highest = 0, 0.0, 0.0

    def __init__(self, plan, layout, reference, recipe):
        super().__init__(plan, layout, reference, recipe)
        self.reader = open_reader(reference.checkpoint, layout)
        self.others: list[float] = []

    def limited(self, excess):
        """Between the recipe's limits."""
        ceiling = math.inf if self._recipe.ceiling is None else self._recipe.ceiling
        return min(max(excess, self._recipe.floor), ceiling)

    def loss_weights(self, batch):
        mine = batch.token_losses()
        weights = super().loss_weights(batch)
        tokens: list[list[float]] = [[], [], []]
        weighed = [0.0, 0.0]
        alpha = self._standing.weights
        for part, losses in zip(batch.micro_batches, mine, strict=True):
            theirs = self.reader.token_losses(part["tokens"], part["labels"])
            assert theirs is not None
            for row, domain in enumerate(part["domain"].tolist()):
                for column in range(losses.size(1)):
                    if part["loss_mask"][row, column]:
                        proxy = float(losses[row, column])
                        tokens[domain].append(proxy - float(theirs[row, column]))
                        weighed[0] += alpha[domain] * proxy
                        weighed[1] += alpha[domain]
        there = [domain for domain in range(3) if tokens[domain]]
        token_by_token = [np.mean([self.limited(x) for x in tokens[domain]]) for domain in there]
        means = [self.limited(float(np.mean(tokens[domain]))) for domain in there]
        expected, other = token_by_token, means
        if not self._recipe.clip_tokens:
            expected, other = means, token_by_token
        np.testing.assert_allclose(self._standing.excess[there], expected, rtol=1e-4, atol=1e-6)
        Checked.apart = max(Checked.apart, float(np.abs(np.subtract(expected, other)).max()))
        Checked.highest = max(Checked.highest, max(max(part, default=0.0) for part in tokens))
        # What the loop makes of it: the sum of weight times loss over the number of tokens.
        total = sum(
            float((weights[part["domain"]][:, None] * losses * part["loss_mask"]).sum())
            for part, losses in zip(batch.micro_batches, mine, strict=True)
        )
        assert total / sum(map(len, tokens)) == pytest.approx(weighed[0] / weighed[1], rel=1e-5)
        Checked.steps += 1
        return weights


Checked.__name__ = ExcessLossReweighting.__name__  # checkpoints say it


@pytest.mark.parametrize(
    ("rule", "masked"),
    [
        (SLOW, False),
        (DoremiRule(doremi_eta=0.1, excess_ceiling=0.3), True),
        (DoremiRule("fork"), False),
        (DoremiRule("fork", excess_ceiling=0.3), True),
    ],
)
def test_excess_losses_and_the_loss_are_those_of_a_loop_over_tokens(
    options, monkeypatch, masked, rule
):
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Checked)
    monkeypatch.setattr(Checked, "steps", 0)
    monkeypatch.setattr(Checked, "apart", 0.0)
    monkeypatch.setattr(Checked, "highest", 0.0)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    assert compute_doremi(options(rule=rule, proxy={"train_iters": 3, "boundaries": boundaries}))
    assert Checked.steps == 3
    assert Checked.apart > 1e-3  # the other variant's excess is told apart from this one's
    assert Checked.highest > 0.3  # and so is one without the ceiling


def test_a_proxy_that_is_its_reference_keeps_the_weights_but_for_rounding(
    options, monkeypatch, finished_run
):
    """All excess losses are zero, and the rate of learning is as good as zero too."""
    given = options(
        proxy={"optimizer": OptimizerOptions(lr=1e-30, min_lr=0.0, lr_warmup_iters=0)},
    )
    checkpoint = find_checkpoint(finished_run)

    def from_reference(*arguments):
        plan = plan_doremi(*arguments)
        run = dataclasses.replace(plan.proxy_run, pretrained_checkpoint=checkpoint)
        return dataclasses.replace(plan, proxy_run=run)

    monkeypatch.setattr(compute_module, "plan_doremi", from_reference)
    compute_doremi(given)
    assert Mixture.load(given.output).weights == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert max(hook_lines(given.output)[-1]["excess"].values()) < 1e-6


def test_the_cost_is_that_of_two_runs_and_two_forward_passes(found, finished_run):
    mixture, proxy = Mixture.load(found), proxy_of(found)
    made_from = [found.parent / path for path in mixture.parameters["made_from"]]
    assert [path.resolve() for path in made_from] == [finished_run.resolve(), proxy.root.resolve()]
    runs = [TrainingRun.load(path).cost for path in made_from]
    assert runs[1].flops == pytest.approx(runs[0].flops * (1 + 2 / 3))
    total = mixture.parameters["total_cost"]
    assert total["flops"] == pytest.approx(runs[0].flops + runs[1].flops + mixture.cost.flops)
    seconds = sum(cost.device_seconds for cost in (*runs, mixture.cost))
    assert total["device_seconds"] == pytest.approx(seconds)
    assert mixture.cost.flops == 0
    tokens = STEPS * 8 * 32
    assert mixture.parameters["paper_flops"] == 2 * 6 * (12 * 4 * 64**2) * tokens


def test_the_mixture_says_what_it_was_made_of(found, corpus, finished_run):
    mixture = Mixture.load(found)
    assert (mixture.method, mixture.parameters["variant"]) == ("doremi", "original")
    assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 1e-3)
    assert mixture.parameters["reference"]["train_iters"] == STEPS
    assert mixture.provenance is not None
    reference = CheckpointRecord.load(find_checkpoint(finished_run))
    assert mixture.provenance.inputs["reference"] == reference.hash
    assert mixture.provenance.inputs["corpus"] == corpus.hash


def test_a_reference_of_another_size_and_mixture_is_trained_first(options, corpus, capsys):
    given = options(
        reference=None,
        reference_mixture="natural",
        reference_model_size="tiny",
        proxy={"train_iters": 4},
    )
    METHOD.compute(given)
    folder = given.output.with_suffix("")
    reference, proxy = (TrainingRun.load(folder / name) for name in ("reference", "proxy"))
    assert (reference.status, proxy.status) == ("finished", "finished")
    total = sum(corpus.train_tokens.values())
    assert reference.mixture == pytest.approx(
        {name: tokens / total for name, tokens in corpus.train_tokens.items()}
    )
    assert proxy.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert (reference.model["size"]["hidden_size"], proxy.model["size"]["hidden_size"]) == (128, 64)
    mixture = Mixture.load(given.output)
    assert mixture.parameters["reference"]["model_size"] == "tiny"
    sizes_trained = [
        12 * run.model["size"]["num_layers"] * run.model["size"]["hidden_size"] ** 2
        for run in (reference, proxy)
    ]
    assert mixture.parameters["paper_flops"] == 6 * proxy.tokens * sum(sizes_trained)
    assert mixture.parameters["made_from"] == ["doremi/reference", "doremi/proxy"]
    # The reference's forward pass counts at its own shape.
    sizes = [
        shape_of(CheckpointRecord.load(step_folder(run.root, 4))) for run in (reference, proxy)
    ]
    forward = [forward_flops(shape, proxy.tokens, 32) for shape in sizes]
    assert reference.cost.flops == pytest.approx(3 * forward[0])
    assert proxy.cost.flops == pytest.approx(4 * forward[1] + forward[0])
    said = capsys.readouterr().out
    assert f"DoReMi's reference, in {folder / 'reference'}" in said
    assert f"written to {given.output}; next: tools/pretrain_gpt.py" in said


def test_the_forks_variant_clips_means(options):
    given = options(rule=DoremiRule(doremi_variant="fork"), proxy={"train_iters": 3})
    compute_doremi(given)
    mixture = Mixture.load(given.output)
    assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 0.0)
    assert mixture.parameters["steps_averaged"] == 3
    weights = [line["weights"]["code"] for line in hook_lines(given.output)]
    assert mixture.weights["code"] == pytest.approx(np.mean(weights))


def test_limits_of_the_excess_are_of_each_token(options):
    """Early in training nearly every token is further behind than this."""
    rule = DoremiRule(doremi_eta=0.1, excess_floor=0.01, excess_ceiling=0.02)
    given = options(rule=rule, proxy={"train_iters": 3})
    compute_doremi(given)
    for line in hook_lines(given.output):
        assert all(0.01 <= excess <= 0.02 for excess in line["excess"].values())


def test_a_proxy_that_was_killed_goes_on_and_finds_the_same(options, found, monkeypatch, capsys):
    def kill(_model):
        raise RuntimeError("killed")

    given = options()
    with monkeypatch.context() as patched:
        before_steps(patched, {5: kill})
        with pytest.raises(RuntimeError, match="killed"):
            compute_doremi(given)
    assert not given.output.exists()
    assert compute_doremi(given)
    assert "continuing at step 3" in capsys.readouterr().out
    assert figures_of(given.output) == figures_of(found)
    assert state_of(given.output) == state_of(found)
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


def test_a_reference_that_was_killed_goes_on_first(options, found, monkeypatch, capsys):
    """The reference that it trains itself is the run that the others were given."""

    def kill(_model):
        raise RuntimeError("killed")

    given = options(reference=None)
    with monkeypatch.context() as patched:
        before_steps(patched, {5: kill})
        with pytest.raises(RuntimeError, match="killed"):
            compute_doremi(given)
    assert not (given.output.with_suffix("") / "proxy").exists()
    assert compute_doremi(given)
    assert "continuing at step 3" in capsys.readouterr().out
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


def test_it_leaves_when_it_is_asked_to_stop(options, capsys):
    given = options(proxy={"stopping": StoppingOptions(exit_duration_in_mins=1e-6)})
    assert METHOD.compute(given) == STOPPED_STATUS
    assert "stopped in the proxy; the same command goes on" in capsys.readouterr().out
    assert (proxy_of(given.output).step, given.output.exists()) == (1, False)


def test_the_same_command_again_trains_nothing(options, half_done, found, capsys):
    before = (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns
    given = options()
    compute_doremi(given)
    assert "nothing to do" in capsys.readouterr().out
    assert (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns == before
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (DoremiRule(doremi_eta=0.2), "another rule: eta 0.1, not 0.2; give another --work-dir"),
        (DoremiRule("fork", 0.1, 1e-3), "another rule: clip_tokens True, not False"),
    ],
)
def test_a_proxy_of_another_rule_is_refused(options, half_done, rule, said, finished):
    if not finished:
        shutil.rmtree(step_folder(half_done / "proxy", STEPS))
    with pytest.raises(UserError, match=said):
        compute_doremi(options(rule=rule))
    assert not options().output.exists()


def test_a_proxy_of_another_reference_is_refused(options, half_done, tmp_path):
    other = options("other", reference=None, proxy={"train_iters": 4})
    compute_doremi(other)
    reference = other.output.with_suffix("") / "reference"
    with pytest.raises(UserError, match=r"compared with another reference than .*step-00000004"):
        compute_doremi(options(reference=reference))


def test_a_run_that_nobody_watched_is_no_proxy(options, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "4-mixture" / "doremi" / "proxy")
    said = r"holds a run that DoReMi has not watched \(nothing has\); give another --work-dir, or"
    with pytest.raises(UserError, match=said):
        compute_doremi(options())


def test_proxies_of_other_options_are_refused_with_the_way_out(options, half_done):
    with pytest.raises(UserError, match="--seed 1234, not 7") as refused:
        compute_doremi(options(proxy={"seed": 7}))
    assert f"or delete {half_done / 'proxy'} to start anew" in str(refused.value)


def folder_of_doge(corpus, output: Path) -> None:
    """A mixture of DoGE in the place of DoReMi's, with its proxy."""
    assert compute_doge(DogeOptions(corpus=corpus.root, output=output, proxy=proxy_options()))
    output.unlink()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"holds a proxy, and its reference is not in .*reference, or not finished"),
        ({"proxy": {"seed": 7}}, "doremi/proxy holds a run with --seed 1234, not 7; give another"),
    ],
)
def test_what_the_proxys_folder_holds_is_looked_at_before_the_reference_is_trained(
    options, half_done, changes, said
):
    with pytest.raises(UserError, match=said) as refused:
        compute_doremi(options(reference=None, **changes))
    assert f"delete {half_done / 'proxy'} to start anew" in str(refused.value)
    assert not (half_done / "reference").exists()


def test_another_methods_proxy_is_refused_before_the_reference_is_trained(options, corpus):
    given = options(reference=None)
    folder_of_doge(corpus, given.output)
    said = r"DoReMi has not watched \(GradientAlignment has\); give another --work-dir, or delete"
    with pytest.raises(UserError, match=said):
        compute_doremi(given)
    assert not (given.output.with_suffix("") / "reference").exists()


def test_a_reference_of_other_options_is_refused_before_the_proxy_is(options, half_done, capsys):
    given = options(reference=None, proxy={"seed": 7})
    shutil.copytree(half_done / "proxy", half_done / "reference")
    shutil.rmtree(half_done / "proxy")
    with pytest.raises(UserError, match="reference holds a run with --seed 1234, not 7"):
        compute_doremi(given)
    assert capsys.readouterr().out == ""


def test_a_proxy_that_is_finished_builds_no_reference(options, half_done, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)
    assert compute_doremi(options())


def test_a_reference_that_does_not_fit_is_told(options, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)
    given = options()
    with pytest.raises(UserError, match=r"^DoReMi's proxy: out of memory: .*, the reference 0\.0"):
        compute_doremi(given)
    assert not (given.output.with_suffix("") / "proxy").exists()


def test_the_memory_of_the_reference_is_counted(options, monkeypatch):
    counted = []

    class Counting(ExcessLossReweighting):
        def prepare(self):
            super().prepare()
            assert self._passes is not None
            (model,) = self._passes.model
            held = sum(part.numel() * part.element_size() for part in model.parameters())
            setup = training_setup(self._plan.options, self._plan.shape, 1)
            counted.append((held, self.extra_bytes(setup, 0, 3)))

    Counting.__name__ = ExcessLossReweighting.__name__
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Counting)
    compute_doremi(options(proxy={"train_iters": 3}))
    ((held, told),) = counted
    assert told == {"the reference": held}


def test_a_skipped_step_is_undone(options, monkeypatch):
    given = options()
    before_steps(monkeypatch, {4: poison(torch.nan)})
    compute_doremi(given)
    lines = hook_lines(given.output)
    assert lines[3] == lines[2]
    assert lines[4]["weights"] != lines[3]["weights"]
    state = state_of(given.output)
    assert state["counted"] == 1 + STEPS - 1
    path = np.array([[1 / 3] * 3, *(list(line["weights"].values()) for line in lines)])
    moves = np.abs(np.diff(path, axis=0)).sum(1) / 2
    told = Mixture.load(given.output).parameters["moved_per_step"]
    assert told == pytest.approx(moves.sum() / (STEPS - 1))
    assert proxy_of(given.output).skipped_steps == 1


def bad_losses(monkeypatch, factor, *, of_reference):
    """All losses of a model are multiplied by ``factor`` in the third step."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, other=None, other_shape=None):
        bad = batch.step == 2 and (other is not None) == of_reference
        return [(factor if bad else 1.0) * part for part in token_losses(batch, other, other_shape)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


@pytest.mark.parametrize(
    ("factor", "ceiling"), [(math.nan, None), (math.inf, None), (math.inf, 0.3)]
)
def test_losses_of_the_proxy_that_are_no_numbers_leave_the_weights(
    options, monkeypatch, factor, ceiling
):
    bad_losses(monkeypatch, factor, of_reference=False)
    given = options(rule=DoremiRule(doremi_eta=0.1, excess_ceiling=ceiling))
    compute_doremi(given)
    lines = hook_lines(given.output)
    assert lines[2] == lines[1]
    assert state_of(given.output)["counted"] == STEPS


@pytest.mark.parametrize(
    ("factor", "variant"),
    [(math.nan, "original"), (math.inf, "original"), (math.inf, "fork")],
)
def test_losses_of_the_reference_that_are_no_numbers_end_the_run(
    options, monkeypatch, factor, variant
):
    """Also those that are infinite, of which clipping would make an excess loss of 0."""
    bad_losses(monkeypatch, factor, of_reference=True)
    with pytest.raises(UserError, match="has a loss that is not a finite number on 'news'"):
        compute_doremi(options(rule=DoremiRule(variant, 0.1)))


def test_a_reference_without_finite_losses_is_told(options, monkeypatch):
    def spoiled(record, model):
        load_weights(record, model)
        with torch.no_grad():
            next(model[0].parameters()).mul_(torch.nan)

    monkeypatch.setattr(hook_module, "load_weights", spoiled)
    with pytest.raises(UserError, match="has a loss that is not a finite number on 'news'"):
        compute_doremi(options())


def test_a_domain_that_is_absent_from_a_batch_keeps_its_excess_loss(options):
    """Batches of two samples of three domains; at first it is the loss of a guess."""
    given = options(proxy={"global_batch_size": 2, "micro_batch_size": 1})
    compute_doremi(given)
    lines = list(proxy_of(given.output).metrics())
    before = dict.fromkeys(DOMAINS, math.log(VOCAB_SIZE))
    absences = 0
    for line in lines:
        now = line["hook"]["excess"]
        there = {name for name, tokens in line["domain_tokens_drawn"].items() if tokens}
        assert 1 <= len(there) <= 2
        for name in DOMAINS:
            if name not in there:
                assert now[name] == before[name]
                absences += 1
            else:
                assert now[name] != before[name]
        before = now
    assert absences >= STEPS


def test_weights_that_have_not_settled_or_are_nearly_all_on_one_domain_are_told(options):
    given = options(rule=DoremiRule(doremi_eta=1e300))
    with pytest.warns(MixtureWarning) as caught:
        compute_doremi(given)
    said = " ".join(str(warning.message) for warning in caught)
    assert "(total variation) from their mean" in said
    assert "they have not settled; try a smaller --doremi-eta" in said
    assert min(state_of(given.output)["log_weights"]) >= LOWEST_LOG


def test_a_mixture_that_is_nearly_one_hot_is_told(options, half_done):
    """As a proxy of many steps would leave it."""
    path = step_folder(half_done / "proxy", STEPS) / CheckpointRecord.FILE_NAME
    body = json.loads(path.read_text())
    body["hook"]["state"]["mean"] = [0.01, 0.98, 0.01]
    path.write_text(json.dumps(body))
    with pytest.warns(MixtureWarning, match="'code' has 98% of the weight, so the others are"):
        compute_doremi(options())


def test_the_limit_of_epochs_holds(options, corpus):
    budget = sum(corpus.train_tokens.values())
    given = options(token_budget=budget, max_epochs=1.01, proxy={"train_iters": 3})
    compute_doremi(given)
    mixture = Mixture.load(given.output)
    assert mixture.epochs is not None
    assert max(mixture.epochs.values()) <= 1.01 + 1e-9
    assert mixture.unconstrained is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": DoremiRule(doremi_eta=0.0)}, "eta is 0.0: it must be a finite number above 0"),
        ({"rule": DoremiRule(doremi_eta=math.inf)}, "eta is inf: it must be a finite number"),
        ({"rule": DoremiRule(doremi_eps=1.0)}, "eps is 1.0: it lies from 0 on and below 1"),
        ({"rule": DoremiRule(excess_ceiling=-1.0)}, "ceiling is -1.0: it must be a finite number"),
        (
            {"reference_mixture": "natural"},
            "--reference-mixture natural: --reference .* is trained",
        ),
        (
            {"reference_model_size": "tiny"},
            "--reference-model-size tiny: --reference .* is trained",
        ),
        ({"reference": Path("lost")}, "--reference lost: there is no run; give the --run-dir"),
        ({"reference": None, "reference_model_size": "big"}, "big: there is no such size"),
        ({"reference": None, "reference_mixture": "lost.json"}, "lost.json"),
        ({"proxy": {"seq_length": 16}}, "samples of 32 tokens, the proxy's --seq-length is 16"),
        ({"proxy": {"train_iters": 0}}, "--train-iters 0: give a whole number"),
        ({"max_epochs": 2.0}, "--max-epochs limits the epochs of a --token-budget"),
        ({"output": Path("doremi.txt")}, "--output doremi.txt: give a name that ends with .json"),
        ({"output": Path("/dev/null/doremi.json")}, "/dev/null cannot be written to; choose"),
        ({"output": Path("/tmp")}, "--output /tmp is a folder; give the name of a file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(options, tmp_path, changes, said):
    given = dataclasses.replace(options(proxy=changes.pop("proxy", None), work_dir=None), **changes)
    with pytest.raises(UserError, match=said):
        compute_doremi(given)
    assert not (tmp_path / "4-mixture").exists()


def test_a_reference_that_is_not_finished_is_refused(options, trained_run):
    run = TrainingRun.load(trained_run)
    dataclasses.replace(run, status="interrupted", step=3).save()
    with pytest.raises(UserError, match="the run is interrupted at step 3 of 6; finish it first"):
        compute_doremi(options(reference=trained_run))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tokenizer_hash", "0" * 64, "trained with another tokenizer than"),
        ("vocab_size", 300, "has a vocabulary of 300, .* one of 251; give another --reference"),
    ],
)
def test_a_reference_of_another_vocabulary_is_refused(
    options, trained_run, tmp_path, field, value, said
):
    path = find_checkpoint(trained_run) / CheckpointRecord.FILE_NAME
    body = json.loads(path.read_text())
    (body["model"] if field == "vocab_size" else body)[field] = value
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=said):
        compute_doremi(options(reference=trained_run))
    assert not (tmp_path / "4-mixture").exists()


def test_a_reference_of_another_corpus_and_other_documents_is_warned_of_once(options, tmp_path):
    other = write_small_corpus(tmp_path / "corpus", seed=1)
    boundaries = DocumentBoundaryOptions(reset_position_ids=True)
    with pytest.warns(MixtureWarning) as caught:
        compute_doremi(
            options(corpus=other.root, proxy={"train_iters": 3, "boundaries": boundaries})
        )
    said = [str(warning.message) for warning in caught]
    assert len([line for line in said if "was trained on another corpus than" in line]) == 1
    (line,) = [line for line in said if "at the ends of documents" in line]
    assert "was trained with --reset-position-ids False, the proxy is with True" in line


def test_a_corpus_of_one_domain_is_refused(options, tmp_path):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="there is one domain, and nothing to weigh"):
        compute_doremi(options(corpus=alone.root))
    assert not (tmp_path / "4-mixture").exists()


def constructed_document(number: int, rng: np.random.Generator):
    """Of three domains: a text that can be learned, noise, and another such text."""
    if number == 1:
        return rng.integers(0, EOD, 120)
    return (rng.integers(40) + 3 * np.arange(120)) % 40


def test_weights_move_to_what_can_be_learned_from_noise_and_copies_stay_alike(tmp_path, capsys):
    names = ("learnable", "noise", "copy")
    corpus = write_small_corpus(tmp_path / "corpus", names, document=constructed_document)
    given = DoremiOptions(
        corpus=corpus.root,
        output=tmp_path / "doremi.json",
        proxy=proxy_options(train_iters=30, log_interval=10, save_interval=30),
        rule=DoremiRule(doremi_eta=0.1),
    )
    compute_doremi(given)
    weights = Mixture.load(given.output).weights
    assert weights["noise"] < 0.15
    assert weights["learnable"] > 0.4
    assert weights["copy"] == pytest.approx(weights["learnable"], abs=0.05)


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
