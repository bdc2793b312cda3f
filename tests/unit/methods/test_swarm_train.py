"""A swarm's members are runs of their own, trained together; its folder goes on where it was."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.swarm import member_path
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.swarm import group as group_module
from megatron_chameleon.methods.swarm.plan import member_seed
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.methods.swarm.stacked_gpt import StackedGPT
from megatron_chameleon.methods.swarm.train import train_swarm
from megatron_chameleon.model.flops import forward_flops, training_flops
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.swarm import SwarmOptions
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.options.validation import ValidationOptions
from megatron_chameleon.training.pretrain import pretrain
from megatron_chameleon.training.stopping import StopRequests
from tests.small_corpus import DOMAINS, VOCAB_SIZE

STEPS = 6
SHAPE = ModelShape(model_size("nano"), VOCAB_SIZE, 32)
MIXTURES = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]])
# Adam divides by roots of second moments, so that rounding of tiny gradients is felt.
TOLERANCE = 2e-4


def swarm_options(**changes):
    settings = {
        "model_size": "nano",
        "train_iters": STEPS,
        "seq_length": 32,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "lr": 1e-2,
        "lr_warmup_iters": 2,
        "eval_interval": 4,
        "eval_tokens": 18 * 32,
        "save_interval": 2,
        "log_interval": 2,
        **changes,
    }
    return SwarmOptions(**settings)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A swarm that nothing interrupted, and its folder."""
    folder = tmp_path_factory.mktemp("swarm") / "whole"
    return trained(swarm_options(), corpus, MIXTURES, folder), folder


def trained(options, corpus, mixtures, folder) -> SwarmResult:
    """The result of a swarm that comes to its end."""
    result = train_swarm(options, corpus, mixtures, folder)
    assert result is not None
    return result


def same(found, expected):
    np.testing.assert_array_equal(found.losses, expected.losses)
    assert found.steps == expected.steps
    assert found.diverged == expected.diverged


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def test_a_member_is_a_run_by_itself(whole, pretrain_options, tmp_path):
    result, _ = whole
    options = swarm_options()
    for member, mixture in enumerate(MIXTURES[:2]):
        path = tmp_path / f"{member}.json"
        Mixture(dict(zip(DOMAINS, mixture.tolist(), strict=True))).save(path)
        run_dir = tmp_path / f"run-{member}"
        run = pretrain_options(
            run_dir,
            mixture=str(path),
            seed=member_seed(options.seed, member),
            optimizer=options.optimizer,
            validation=ValidationOptions(eval_interval=2, eval_iters=7),
        )
        pretrain(
            dataclasses.replace(run, data=dataclasses.replace(run.data, permutation="feistel"))
        )
        lines = {line["step"]: line for line in read_metrics(run_dir / METRICS_NAME)}
        for place, step in enumerate(result.steps):
            alone = [lines[step]["validation_loss"][name] for name in DOMAINS]
            np.testing.assert_allclose(result.losses[member, place], alone, rtol=0, atol=TOLERANCE)


def test_in_bfloat16_losses_are_near(whole, corpus, tmp_path):
    found = trained(swarm_options(bf16=True), corpus, MIXTURES, tmp_path / "bf16")
    # Members that are trained on all domains, before rounding has grown; a step makes 0.2 to 0.7.
    near, exact = found.losses[[0, 3], 0], whole[0].losses[[0, 3], 0]
    np.testing.assert_allclose(near, exact, rtol=0, atol=0.1)
    assert (near != exact).any()


def test_the_tables_hold_mixtures_and_last_losses_in_the_same_rows(whole):
    result, folder = whole
    ratios, metrics = rows_of(folder / "ratios.csv"), rows_of(folder / "metrics.csv")
    assert ratios[0] == ["index", *(f"train_{name}" for name in DOMAINS)]
    assert metrics[0] == ["index", *(f"valid_{name}" for name in DOMAINS)]
    assert [row[0] for row in ratios[1:]] == [row[0] for row in metrics[1:]] == list("0123")
    np.testing.assert_array_equal(np.array(ratios[1:], float)[:, 1:], MIXTURES)
    np.testing.assert_array_equal(np.array(metrics[1:], float)[:, 1:], result.losses[:, -1])


def test_a_member_knows_most_of_what_it_is_trained_on(whole):
    result, _ = whole
    assert (result.steps, result.diverged) == ([4, STEPS], [])
    assert result.losses.shape == (4, 2, 3)
    last = result.losses[:, -1]
    assert last[1].argmin() == 0
    assert last[3].argmin() == 2
    assert (last.mean(1) < math.log(VOCAB_SIZE)).all()


def test_the_cost_counts_every_pass_of_every_member(whole, corpus):
    result, _ = whole
    seen = len(MIXTURES) * STEPS * 8 * 32
    held_out = sum(min(18 * 32, domain.valid.tokens - 1) for domain in corpus.domains.values())
    measured = len(MIXTURES) * len(result.steps) * held_out
    expected = training_flops(SHAPE, seen, 32) + forward_flops(SHAPE, measured, 32)
    assert result.cost.flops == pytest.approx(expected)
    assert 0 < result.cost.device_seconds == pytest.approx(result.cost.wall_seconds)


def test_members_do_not_depend_on_how_they_are_grouped(whole, corpus, tmp_path):
    result, _ = whole
    for number, changes in enumerate(({"members_at_once": 1}, {"members_at_once": 3})):
        found = trained(swarm_options(**changes), corpus, MIXTURES, tmp_path / str(number))
        np.testing.assert_allclose(found.losses, result.losses, rtol=0, atol=TOLERANCE)


def test_a_swarm_that_is_there_is_not_trained_again(whole, corpus, monkeypatch):
    result, folder = whole
    monkeypatch.setattr(group_module, "Group", None)
    again = trained(swarm_options(save_interval=0), corpus, MIXTURES, folder)
    same(again, result)
    assert again.cost == result.cost


def test_members_may_be_added(whole, corpus, tmp_path):
    result, _ = whole
    train_swarm(swarm_options(), corpus, MIXTURES[:1], tmp_path / "more")
    before = member_path(tmp_path / "more", 0).read_bytes()
    found = trained(swarm_options(), corpus, MIXTURES, tmp_path / "more")
    assert member_path(tmp_path / "more", 0).read_bytes() == before
    np.testing.assert_allclose(found.losses, result.losses, rtol=0, atol=TOLERANCE)


class Killed(BaseException):
    """What kill -9 leaves of a process, as far as its files go."""


def killed_after(monkeypatch, passes):
    """Let the process end in the pass after so many."""
    plain = StackedGPT.forward_backward
    left = iter(range(passes))

    def forward_backward(self, *arguments):
        if next(left, None) is None:
            raise Killed
        return plain(self, *arguments)

    monkeypatch.setattr(StackedGPT, "forward_backward", forward_backward)


@pytest.mark.parametrize("passes", [1, 5, 9, 11])
def test_a_killed_swarm_goes_on_to_the_same_bits(whole, corpus, tmp_path, monkeypatch, passes):
    result, _ = whole
    with monkeypatch.context() as killing:
        killed_after(killing, passes)
        with pytest.raises(Killed):
            train_swarm(swarm_options(), corpus, MIXTURES, tmp_path / "killed")
    begun = passes // 4 * 2  # two passes a step, and a checkpoint every second step
    checkpoints = list((tmp_path / "killed" / "groups").glob("*.safetensors"))
    assert len(checkpoints) == (begun > 0)
    steps = []

    def counted_flops(*arguments):
        steps.append(1)
        return training_flops(*arguments)

    monkeypatch.setattr(group_module, "training_flops", counted_flops)
    found = trained(swarm_options(), corpus, MIXTURES, tmp_path / "killed")
    same(found, result)
    assert len(steps) == STEPS - begun
    assert found.cost.flops == result.cost.flops
    assert not list((tmp_path / "killed" / "groups").glob("*.safetensors"))


def test_a_swarm_killed_among_groups_keeps_the_finished_ones(corpus, tmp_path, monkeypatch):
    options = swarm_options(members_at_once=2)
    alone = trained(options, corpus, MIXTURES, tmp_path / "alone")
    with monkeypatch.context() as killing:
        killed_after(killing, 2 * STEPS + 5)
        with pytest.raises(Killed):
            train_swarm(options, corpus, MIXTURES, tmp_path / "killed")
    finished = {member: member_path(tmp_path / "killed", member) for member in (0, 1)}
    before = {member: path.read_bytes() for member, path in finished.items()}
    assert not member_path(tmp_path / "killed", 2).exists()
    same(trained(options, corpus, MIXTURES, tmp_path / "killed"), alone)
    assert {member: path.read_bytes() for member, path in finished.items()} == before


class StopsAfter(StopRequests):
    """Asks for a stop when it has been looked at so many times."""

    def __init__(self, looks):
        super().__init__(StoppingOptions())
        self.looks = looks

    def flags(self):
        self.looks -= 1
        return [1.0, 0.0, 0.0, 0.0] if self.looks < 0 else [0.0] * 4


@pytest.mark.parametrize("looks", [0, 1, 2, 5])
def test_a_stopped_swarm_saves_and_goes_on_to_the_same_bits(whole, corpus, tmp_path, looks):
    folder = tmp_path / "stopped"
    options = swarm_options(save_interval=0)
    stopped = train_swarm(options, corpus, MIXTURES, folder, StopsAfter(looks))
    assert stopped is None
    assert len(list((folder / "groups").glob("*.safetensors"))) == (looks > 0)
    same(trained(options, corpus, MIXTURES, folder), whole[0])


def test_a_stop_that_another_rank_was_asked_for_is_heeded(corpus, tmp_path, monkeypatch, whole):
    folder = tmp_path / "stopped"
    plain = StackedGPT.forward_backward

    def forward_backward(self, *arguments):
        (folder / "stop-is-asked").write_text("SIGTERM\n")
        return plain(self, *arguments)

    with monkeypatch.context() as asking:
        asking.setattr(StackedGPT, "forward_backward", forward_backward)
        assert train_swarm(swarm_options(), corpus, MIXTURES, folder) is None
    same(trained(swarm_options(), corpus, MIXTURES, folder), whole[0])


def spoilt(monkeypatch, member_place, step):
    """Make a weight of one member no number before a step."""
    plain = StackedGPT.begin_step
    steps = iter(range(1, 1000))

    def begin_step(self):
        plain(self)
        if next(steps) == step + 1:  # the first is the constructor's
            self.weights["decoder.final_layernorm.weight"].data[member_place, 0] = math.nan

    monkeypatch.setattr(StackedGPT, "begin_step", begin_step)


def test_a_member_that_diverges_is_left_out_and_harms_no_other(
    whole, corpus, tmp_path, monkeypatch, capsys
):
    result, _ = whole
    spoilt(monkeypatch, 2, 3)
    found = trained(swarm_options(), corpus, MIXTURES, tmp_path / "one-bad")
    assert found.diverged == [2]
    assert np.isnan(found.losses[2]).all()
    kept = [0, 1, 3]
    np.testing.assert_allclose(found.losses[kept], result.losses[kept], rtol=0, atol=TOLERANCE)
    said = capsys.readouterr()
    word = "member 2 has diverged and is left out: its loss or gradient was not finite in step 3"
    assert word in said.out + said.err
    assert "1 diverged and left out" in said.out
    for table in ("ratios.csv", "metrics.csv"):
        rows = rows_of(tmp_path / "one-bad" / table)
        assert [row[0] for row in rows[1:]] == ["0", "1", "3"]
    assert found.cost.flops < result.cost.flops


def test_a_swarm_of_which_all_diverge_says_so(corpus, tmp_path, monkeypatch, capsys):
    found = trained(swarm_options(max_loss=1e-3), corpus, MIXTURES, tmp_path / "all-bad")
    assert found.diverged == [0, 1, 2, 3]
    said = capsys.readouterr()
    assert (said.out + said.err).count("left out: its held-out loss was") == 4
    assert rows_of(tmp_path / "all-bad" / "ratios.csv")[1:] == []


@pytest.mark.parametrize(
    ("changes", "mixtures", "words"),
    [
        ({"lr": 5e-3}, MIXTURES, "begun with --lr 0.01, not 0.005"),
        ({"train_iters": 7}, MIXTURES, "begun with --train-iters 6, not 7"),
        ({}, MIXTURES[[0, 2, 1, 3]], "its member 1 was begun with another mixture"),
        ({}, MIXTURES[:2], "it has 4 members, more than the 2 asked"),
    ],
)
def test_a_folder_of_another_swarm_is_refused(whole, corpus, changes, mixtures, words):
    _, folder = whole
    with pytest.raises(UserError, match="holds another swarm") as refused:
        train_swarm(swarm_options(**changes), corpus, mixtures, folder)
    assert words in str(refused.value)
    assert str(refused.value).endswith("; give the same, or another --work-dir")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_size": "2m"}, "--model-size 2m"),
        ({"micro_batch_size": 3}, "--micro-batch-size 3 does not divide"),
        ({"members_at_once": 0}, "--members-at-once 0"),
        ({"eval_tokens": 31}, "--eval-tokens 31 is less than one window"),
        ({"eval_interval": -1}, "--eval-interval -1"),
        ({"lr_warmup_iters": 6}, "--lr-warmup-iters 6"),
        ({"max_loss": 0.0}, "--max-loss 0.0"),
        ({"seed": -1}, "--seed -1"),
        ({"seq_length": 10_000, "eval_tokens": 10_000}, "fewer than one sequence"),
    ],
)
def test_options_that_cannot_be_are_refused(corpus, tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        train_swarm(swarm_options(**changes), corpus, MIXTURES, tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("row", [[0.5, 0.6, -0.1], [0.5, 0.4, 0.0], [math.nan, 0.5, 0.5]])
def test_mixtures_that_cannot_be_are_refused(corpus, tmp_path, row):
    with pytest.raises(UserError, match="mixture 1 is"):
        train_swarm(swarm_options(), corpus, np.array([[1.0, 0, 0], row]), tmp_path / "no")
    with pytest.raises(UserError, match="give one row for each member"):
        train_swarm(swarm_options(), corpus, np.array([[1.0]]), tmp_path / "no")


def test_a_damaged_checkpoint_is_told_of(corpus, tmp_path):
    folder = tmp_path / "damaged"
    train_swarm(swarm_options(), corpus, MIXTURES, folder, StopsAfter(1))
    (path,) = (folder / "groups").glob("*.safetensors")
    content = path.read_bytes()
    for damaged in (content[:100], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="delete it"):
            train_swarm(swarm_options(), corpus, MIXTURES, folder)


def test_a_cosine_decays_and_a_constant_rate_does_not():
    constant = swarm_options().optimizer
    assert isinstance(constant, OptimizerOptions)
    assert (constant.lr, constant.min_lr) == (1e-2, 1e-2)
    cosine = swarm_options(lr_decay_style="cosine", min_lr=1e-3).optimizer
    assert (cosine.lr, cosine.min_lr) == (1e-2, 1e-3)


def test_every_member_has_a_seed_of_its_own():
    seeds = {member_seed(seed, member) for seed in (0, 1) for member in range(1000)}
    assert len(seeds) == 2000
    assert min(seeds) >= 0
    assert max(seeds) < 2**32


def test_what_is_written_is_plain_json(whole):
    _, folder = whole
    told = json.loads((folder / "swarm.json").read_text())
    assert told["settings"]["train_iters"] == STEPS
    assert "members_at_once" not in told["settings"]
    assert told["mixtures"] == MIXTURES.tolist()
