"""tools/compute_mixture.py --method doremi on one rank."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord, Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import HookState, find_checkpoint, step_folder
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi import METHOD
from megatron_chameleon.methods.doremi import compute as compute_module
from megatron_chameleon.methods.doremi import hook as hook_module
from megatron_chameleon.methods.doremi.compute import compute_doremi, plan_doremi, recipe_of
from megatron_chameleon.methods.doremi.hook import ExcessLossReweighting
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.mixture.doremi import RECIPES
from megatron_chameleon.training.hook import GlobalBatch
from megatron_chameleon.training.memory import training_setup
from megatron_chameleon.training.options import OptimizerOptions
from tests.small_corpus import DOMAINS, EOD, write_small_corpus
from tests.unit.launched import Launcher, write_everything
from tests.unit.training.bad_steps import before_steps, poison, run_out

STEPS = 6
SLOW = DoremiRule(doremi_eta=0.1)


def doremi_options(output, proxy=None, **changes) -> DoremiOptions:
    """Six steps of a nano proxy, with a small step size of the weights."""
    settings = {
        "model_size": "nano",
        "seq_length": 32,
        "train_iters": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "log_interval": 1,
        "save_interval": 3,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
        **(proxy or {}),
    }
    return DoremiOptions(output=output, proxy=ProxyOptions(**settings), **{"rule": SLOW, **changes})


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(name, proxy, **changes)``: with a finished reference."""

    def make(name="doremi", proxy=None, **changes) -> DoremiOptions:
        run_options = {"corpus": corpus.root, "reference": finished_run, **changes}
        return doremi_options(tmp_path / "4-mixture" / f"{name}.json", proxy, **run_options)

    return make


@pytest.fixture(scope="module")
def found(corpus, finished_run, tmp_path_factory) -> Path:
    """A read-only mixture, next to its proxy."""
    output = tmp_path_factory.mktemp("found") / "doremi.json"
    assert compute_doremi(doremi_options(output, corpus=corpus.root, reference=finished_run))
    return output


@pytest.fixture
def half_done(found, tmp_path):
    """A copy of that proxy at the path of the one that ``options()`` trains."""
    return Path(shutil.copytree(found.with_suffix(""), tmp_path / "4-mixture" / "doremi"))


def proxy_of(output: Path) -> TrainingRun:
    return TrainingRun.load(output.with_suffix("") / "proxy")


def hook_lines(output: Path) -> list[dict]:
    return [line["hook"] for line in proxy_of(output).metrics()]


def state_of(output: Path, step=STEPS):
    record = CheckpointRecord.load(step_folder(output.with_suffix("") / "proxy", step))
    assert record.hook is not None
    return record.hook.state


def kill(_model):
    raise RuntimeError("killed")


def test_the_mixture_is_the_mean_over_the_proxys_steps(found, corpus, finished_run):
    mixture, lines = Mixture.load(found), hook_lines(found)
    parameters = mixture.parameters
    steps = [dict.fromkeys(DOMAINS, 1 / 3), *(line["weights"] for line in lines)]
    assert len(steps) == STEPS + 1
    for name in DOMAINS:
        mean = np.mean([weights[name] for weights in steps])
        assert mixture.weights[name] == pytest.approx(mean)
        assert parameters["last_weights"][name] == pytest.approx(steps[-1][name])
        path = [line["weights"][name] for line in lines]
        assert parameters["trajectory"]["weights"][name] == path
        later = path[STEPS // 2 :]
        assert parameters["range_in_second_half"][name] == [min(later), max(later)]
    assert parameters["trajectory"]["steps"] == list(range(1, STEPS + 1))
    assert mixture.scores == lines[-1]["excess"]
    assert max(mixture.weights.values()) - min(mixture.weights.values()) > 1e-3
    assert (mixture.method, parameters["variant"]) == ("doremi", "original")
    assert (parameters["eta"], parameters["eps"]) == (0.1, 1e-3)
    assert parameters["reference"]["train_iters"] == STEPS
    assert mixture.provenance is not None
    reference = CheckpointRecord.load(find_checkpoint(finished_run))
    assert mixture.provenance.inputs["reference"] == reference.hash
    assert mixture.provenance.inputs["corpus"] == corpus.hash


class Checked(ExcessLossReweighting):
    """Compares each step with a loop over tokens, and the reference with an evaluated model."""

    steps, apart, highest = 0, 0.0, 0.0

    def __init__(self, plan, layout, reference, recipe):
        super().__init__(plan, layout, reference, recipe)
        self.reader = open_reader(reference.checkpoint, layout)

    def prepare(self):
        super().prepare()
        assert self._passes is not None
        (model,) = self._passes.model
        held = sum(part.numel() * part.element_size() for part in model.parameters())
        setup = training_setup(self._plan.options, self._plan.shape, 1)
        assert self.extra_bytes(setup, 0, 3) == {"the reference": held}

    def clipped(self, excess):
        ceiling = math.inf if self._recipe.ceiling is None else self._recipe.ceiling
        return min(max(excess, self._recipe.floor), ceiling)

    def loss_weights(self, batch):
        losses_of_proxy = batch.token_losses()
        weights = super().loss_weights(batch)
        tokens: list[list[float]] = [[], [], []]
        weighed = [0.0, 0.0]
        alpha = self._state.weights
        for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True):
            reference = self.reader.token_losses(part["tokens"], part["labels"])
            assert reference is not None
            for row, domain in enumerate(part["domain"].tolist()):
                for column in range(losses.size(1)):
                    if part["loss_mask"][row, column]:
                        proxy = float(losses[row, column])
                        tokens[domain].append(proxy - float(reference[row, column]))
                        weighed[0] += alpha[domain] * proxy
                        weighed[1] += alpha[domain]
        present = [domain for domain in range(3) if tokens[domain]]
        clipped_tokens = [np.mean([self.clipped(x) for x in tokens[d]]) for d in present]
        clipped_means = [self.clipped(float(np.mean(tokens[d]))) for d in present]
        expected, other = clipped_tokens, clipped_means
        if not self._recipe.clip_tokens:
            expected, other = clipped_means, clipped_tokens
        np.testing.assert_allclose(self._state.excess[present], expected, rtol=1e-4, atol=1e-6)
        Checked.apart = max(Checked.apart, float(np.abs(np.subtract(expected, other)).max()))
        Checked.highest = max(Checked.highest, max(max(part, default=0.0) for part in tokens))
        # The loss of the step: the sum of weight times loss over the number of tokens.
        total = sum(
            float((weights[part["domain"]][:, None] * losses * part["loss_mask"]).sum())
            for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True)
        )
        assert total / sum(map(len, tokens)) == pytest.approx(weighed[0] / weighed[1], rel=1e-5)
        Checked.steps += 1
        return weights


Checked.__name__ = ExcessLossReweighting.__name__  # recorded in checkpoints


@pytest.mark.parametrize(
    ("rule", "masked"),
    [
        (DoremiRule(doremi_eta=0.1, excess_ceiling=0.3), False),
        (DoremiRule("fork", excess_ceiling=0.3), True),
    ],
)
def test_excess_losses_and_the_loss_equal_a_loop_over_tokens(options, monkeypatch, masked, rule):
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Checked)
    for name, value in (("steps", 0), ("apart", 0.0), ("highest", 0.0)):
        monkeypatch.setattr(Checked, name, value)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    run_options = options(rule=rule, proxy={"train_iters": 3, "boundaries": boundaries})
    assert compute_doremi(run_options)
    assert Checked.steps == 3
    assert Checked.apart > 1e-3  # the variants differ,
    assert Checked.highest > 0.3  # and the ceiling has an effect
    if rule.doremi_variant == "fork":
        mixture = Mixture.load(run_options.output)
        assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 0.0)
        assert mixture.parameters["steps_averaged"] == 3
        weights = [line["weights"]["code"] for line in hook_lines(run_options.output)]
        assert mixture.weights["code"] == pytest.approx(np.mean(weights))


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


def test_a_reference_of_another_size_and_mixture_is_trained_first(options, corpus):
    run_options = options(
        reference=None,
        reference_mixture="natural",
        reference_model_size="tiny",
        proxy={"train_iters": 4},
    )
    METHOD.compute(run_options)
    folder = run_options.output.with_suffix("")
    reference, proxy = (TrainingRun.load(folder / name) for name in ("reference", "proxy"))
    assert (reference.status, proxy.status) == ("finished", "finished")
    total = sum(corpus.train_tokens.values())
    shares = {name: tokens / total for name, tokens in corpus.train_tokens.items()}
    assert reference.mixture == pytest.approx(shares)
    assert proxy.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    sizes = [run.model["size"] for run in (reference, proxy)]
    assert [size["hidden_size"] for size in sizes] == [128, 64]
    mixture = Mixture.load(run_options.output)
    assert mixture.parameters["reference"]["model_size"] == "tiny"
    layers = sum(12 * size["num_layers"] * size["hidden_size"] ** 2 for size in sizes)
    assert mixture.parameters["paper_flops"] == 6 * proxy.tokens * layers
    assert mixture.parameters["made_from"] == ["doremi/reference", "doremi/proxy"]


def constructed_document(number: int, rng: np.random.Generator):
    """Three domains: learnable text, noise, and learnable text again."""
    if number == 1:
        return rng.integers(0, EOD, 120)
    return (rng.integers(40) + 3 * np.arange(120)) % 40


def test_learnable_domains_gain_over_noise_and_copies_stay_equal(tmp_path):
    names = ("learnable", "noise", "copy")
    corpus = write_small_corpus(tmp_path / "corpus", names, document=constructed_document)
    proxy = {"train_iters": 30, "log_interval": 10, "save_interval": 30}
    run_options = doremi_options(tmp_path / "doremi.json", proxy, corpus=corpus.root)
    compute_doremi(run_options)
    weights = Mixture.load(run_options.output).weights
    assert weights["noise"] < 0.15
    assert weights["learnable"] > 0.4
    assert weights["copy"] == pytest.approx(weights["learnable"], abs=0.05)


def test_a_reference_that_does_not_fit_is_an_error(options, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)
    run_options = options()
    with pytest.raises(UserError, match=r"^DoReMi's proxy: out of memory: .*, the reference 0\.0"):
        compute_doremi(run_options)
    assert not (run_options.output.with_suffix("") / "proxy").exists()


def test_a_skipped_step_is_undone(options, monkeypatch):
    run_options = options()
    before_steps(monkeypatch, {4: poison(torch.nan)})
    compute_doremi(run_options)
    lines = hook_lines(run_options.output)
    assert lines[3] == lines[2]
    assert lines[4]["weights"] != lines[3]["weights"]
    assert state_of(run_options.output)["counted"] == 1 + STEPS - 1
    path = np.array([[1 / 3] * 3, *(list(line["weights"].values()) for line in lines)])
    moves = np.abs(np.diff(path, axis=0)).sum(1) / 2
    per_step = Mixture.load(run_options.output).parameters["moved_per_step"]
    assert per_step == pytest.approx(moves.sum() / (STEPS - 1))
    assert proxy_of(run_options.output).skipped_steps == 1


def scale_losses(monkeypatch, factor, *, of_reference):
    """Multiply all losses of one model by ``factor`` in the third step."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, other=None, other_shape=None):
        bad = batch.step == 2 and (other is not None) == of_reference
        return [(factor if bad else 1.0) * part for part in token_losses(batch, other, other_shape)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


def test_non_finite_losses_of_the_proxy_leave_the_weights(options, monkeypatch):
    """Even if clipping would hide them."""
    scale_losses(monkeypatch, math.inf, of_reference=False)
    run_options = options(rule=DoremiRule(doremi_eta=0.1, excess_ceiling=0.3))
    compute_doremi(run_options)
    lines = hook_lines(run_options.output)
    assert lines[2] == lines[1]
    assert state_of(run_options.output)["counted"] == STEPS


@pytest.mark.parametrize(("factor", "variant"), [(math.nan, "original"), (math.inf, "fork")])
def test_non_finite_losses_of_the_reference_are_errors(options, monkeypatch, factor, variant):
    """Also infinite ones, which clipping would turn into an excess loss of 0."""
    scale_losses(monkeypatch, factor, of_reference=True)
    with pytest.raises(UserError, match="'news'"):
        compute_doremi(options(rule=DoremiRule(variant, 0.1)))


def edit_state(half_done, **changes):
    """Change the state of the hook in the proxy's last checkpoint."""
    record = CheckpointRecord.load(step_folder(half_done / "proxy", STEPS))
    assert record.hook is not None
    hook = HookState(record.hook.name, {**record.hook.state, **changes})
    dataclasses.replace(record, hook=hook).save()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mean": [0.5, 0.5]}, "'mean'"),
        ({"excess": [1.0, None, 2.0]}, "'excess'"),
        ({"reference": "0" * 64}, "reference 000"),
    ],
)
def test_a_damaged_state_or_one_of_another_reference_is_an_error(
    options, half_done, change, problem, capsys
):
    edit_state(half_done, **change)
    with pytest.raises(UserError, match=problem):
        compute_doremi(options())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": DoremiRule(excess_ceiling=-1.0)}, "--excess-ceiling"),
        ({"reference_mixture": "natural"}, "--reference-mixture natural"),
        ({"reference_model_size": "tiny"}, "--reference-model-size tiny"),
        ({"reference": Path("lost")}, "--reference lost"),
        ({"reference": None, "reference_model_size": "big"}, "big"),
        ({"reference": None, "reference_mixture": "lost.json"}, r"lost\.json"),
        ({"proxy": {"seq_length": 16}}, "--seq-length 32"),
        ({"proxy": {"global_batch_size": 6}}, "--global-batch-size 6"),
        ({"output": Path("/tmp")}, "--output /tmp"),
    ],
)
def test_mistakes_are_errors_before_training(options, tmp_path, changes, problem):
    proxy = changes.pop("proxy", None)
    with pytest.raises(UserError, match=problem):
        compute_doremi(dataclasses.replace(options(proxy=proxy, work_dir=None), **changes))
    assert not list(tmp_path.rglob("run.json"))


def test_a_corpus_of_one_domain_or_an_unfinished_reference_is_an_error(
    options, tmp_path, trained_run
):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="2 domains"):
        compute_doremi(options(corpus=alone.root))
    run = TrainingRun.load(trained_run)
    dataclasses.replace(run, status="interrupted", step=3).save()
    with pytest.raises(UserError, match="step 3 of 6"):
        compute_doremi(options(reference=trained_run))
    assert not (tmp_path / "4-mixture").exists()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [("tokenizer_hash", "0" * 64, "tokenizer"), ("vocab_size", 300, "vocabulary of 300")],
)
def test_a_reference_of_another_vocabulary_is_an_error(options, trained_run, field, value, problem):
    path = find_checkpoint(trained_run) / CheckpointRecord.FILE_NAME
    body = json.loads(path.read_text())
    (body["model"] if field == "vocab_size" else body)[field] = value
    body.pop("checksum", None)
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=problem):
        compute_doremi(options(reference=trained_run))


@pytest.mark.parametrize(
    ("boundaries", "warned"),
    [
        (DocumentBoundaryOptions(eod_mask_loss=True), False),  # masked tokens are not compared
        (DocumentBoundaryOptions(reset_attention_mask=True), True),
    ],
)
def test_a_reference_trained_on_other_data_is_warned_of(
    options, tmp_path, recwarn, boundaries, warned
):
    other = write_small_corpus(tmp_path / "corpus", seed=1)
    plan_doremi(options(corpus=other.root, proxy={"boundaries": boundaries}))
    (message,) = [str(w.message) for w in recwarn if w.category is MixtureWarning]
    assert str(other.root) in message
    assert ("--reset-attention-mask" in message) is warned


@pytest.mark.parametrize("which", ["proxy", "reference"])
def test_a_killed_run_resumes_with_the_same_result(options, found, monkeypatch, which):
    """The reference trained here equals the user-supplied one."""
    run_options = options(**({"reference": None} if which == "reference" else {}))
    with monkeypatch.context() as patched:
        before_steps(patched, {5: kill})
        with pytest.raises(RuntimeError, match="killed"):
            compute_doremi(run_options)
    assert not run_options.output.exists()
    assert (run_options.output.with_suffix("") / "proxy").exists() is (which == "proxy")
    assert compute_doremi(run_options)
    assert hook_lines(run_options.output) == hook_lines(found)
    if which == "proxy":
        assert state_of(run_options.output) == state_of(found)
    assert Mixture.load(run_options.output).weights == Mixture.load(found).weights


def test_a_finished_proxy_is_reused(options, half_done, found, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)  # no reference is built
    before = (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns
    run_options = options()
    assert compute_doremi(run_options)
    assert (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns == before
    assert Mixture.load(run_options.output).weights == Mixture.load(found).weights


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": DoremiRule(doremi_eta=0.2)}, "eta 0.1, not 0.2"),
        ({"rule": DoremiRule("fork", 0.1, 1e-3)}, "clip_tokens True, not False"),
        ({"proxy": {"seed": 7}}, "--seed 1234, not 7"),
        ({"reference": None}, "reference"),
        ({"reference": None, "proxy": {"seed": 7}}, "--seed 1234, not 7"),
    ],
)
def test_a_proxy_of_other_settings_is_an_error(options, half_done, changes, problem):
    with pytest.raises(UserError, match=problem) as error:
        compute_doremi(options(**changes))
    assert "--work-dir" in str(error.value)
    assert str(half_done / "proxy") in str(error.value)
    assert not options().output.exists()
    assert not (half_done / "reference").exists()


@pytest.mark.parametrize("hook", [None, HookState("GradientAlignment", {})])
def test_a_run_of_another_hook_is_no_proxy(options, half_done, hook):
    record = CheckpointRecord.load(step_folder(half_done / "proxy", STEPS))
    dataclasses.replace(record, hook=hook).save()
    with pytest.raises(UserError, match=hook.name if hook else "no hook"):
        compute_doremi(options(reference=None))
    assert not (half_done / "reference").exists()


def test_a_reference_of_other_options_is_an_error(options, half_done, capsys):
    shutil.move(half_done / "proxy", half_done / "reference")
    with pytest.raises(UserError, match=r"reference.*--seed 1234, not 7"):
        compute_doremi(options(reference=None, proxy={"seed": 7}))
    assert capsys.readouterr().out == ""


def test_the_launcher_computes_the_mixture_of_the_paper(tmp_path):
    write_everything(tmp_path)
    launched = Launcher(tmp_path)("baselines/doremi", "--", "--doremi-eps", "0.01")
    assert launched.status == 0, launched.errors
    (call,) = launched.calls
    run_options = call.options
    assert (call.program, type(run_options)) == ("torchrun", DoremiOptions)
    assert (run_options.proxy.model_size, run_options.reference_mixture) == ("82m", None)
    assert (run_options.rule.doremi_variant, run_options.rule.doremi_eps) == ("original", 0.01)
    assert run_options.output == Path("runs/slimpajama/4-mixture/doremi.json")
    assert (run_options.proxy.train_iters, run_options.proxy.global_batch_size) == (10_000, 128)
    assert (run_options.proxy.optimizer.lr, run_options.proxy.optimizer.min_lr) == (5e-4, 1e-4)
    assert (recipe_of(DoremiRule()), run_options.proxy.bf16) == (RECIPES["original"], True)
