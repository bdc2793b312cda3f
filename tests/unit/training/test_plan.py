"""Test the plan of a run: the artifacts that it reads, and the options that it rejects."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Mixture, MixtureStage, MixtureWarning
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.online.options import PretrainOptions
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.training.options import ReloadOptions
from megatron_chameleon.training.out_of_memory import check_host_memory
from megatron_chameleon.training.plan import plan_training, warn_of_repeats
from tests.families import write_config
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer


@pytest.fixture
def plan(pretrain_options, tmp_path):
    """``plan(**changes)``: the plan of a run of six steps with changed options."""

    def make(**changes):
        return plan_training(pretrain_options(tmp_path / "run", **changes))

    return make


def written(path: Path, weights: dict[str, float]) -> str:
    path.write_text(json.dumps({"weights": weights}))
    return str(path)


def changing(*changes: str) -> DataOptions:
    return DataOptions(mixture_change=(changes,), permutation="epoch")


def test_plan_reads_corpus_mixture_and_mixture_changes(plan, corpus, tmp_path):
    made = plan()
    assert made.data == open_domains(corpus)
    assert made.schedule == MixtureSchedule.fixed([1 / 3] * 3)
    assert made.mixture == Mixture.uniform(list(DOMAINS))
    assert made.config == preset("nano", VOCAB_SIZE, max_sequence_length=32)
    assert made.tokens_per_step == 8 * 32
    assert made.provenance.inputs == {"corpus": corpus.hash, "mixture": made.mixture.hash}
    mixture = written(tmp_path / "m.json", {"poems": 0.5, "news": 0.2, "code": 0.3})
    assert plan(mixture=mixture).schedule.weights_at(0) == (0.2, 0.3, 0.5)
    poems = written(tmp_path / "p.json", {"poems": 1.0, "news": 0.0, "code": 0.0})
    assert plan(data=changing("4=uniform", f"2={poems}")).schedule.phases == (
        Phase(0, (1 / 3,) * 3),
        Phase(2 * 8, (0.0, 0.0, 1.0)),
        Phase(4 * 8, (1 / 3,) * 3),
    )
    ramps = plan(data=changing(f"0..3={poems}", "3..6=uniform"))
    assert ramps.schedule.phases[1:] == (
        Phase(0, (0.0, 0.0, 1.0), 3 * 8),
        Phase(3 * 8, (1 / 3,) * 3, 3 * 8),
    )
    assert sum(ramps.schedule.target_samples(48)) == pytest.approx(48)
    tokens = ramps.data.tokens["poems"]
    assert ramps.epochs(ramps.schedule)["poems"] == pytest.approx(2 / 3 * 6 * 8 * 32 / tokens)


def test_a_mixture_may_change_and_limit_repetition(plan, tmp_path):
    news, code = {"news": 1.0, "code": 0.0, "poems": 0.0}, {"news": 0.0, "code": 1.0, "poems": 0.0}
    stages = [MixtureStage(2, code), MixtureStage(9, news)]
    mixture = tmp_path / "m.json"
    Mixture(news, stages=stages, max_repetition={"code": 0.1, "news": 50.0}).save(mixture)
    given = {"mixture": str(mixture), "data": DataOptions(permutation="epoch")}
    with pytest.warns(MixtureWarning, match="ends before its weights change at step 9"):
        made = plan(**given)
    expected = (Phase(0, (1, 0, 0)), Phase(2 * 8, (0, 1, 0)), Phase(9 * 8, (1, 0, 0)))
    assert made.schedule.phases == expected
    with pytest.warns(MixtureWarning) as caught:
        warn_of_repeats(made.options, made.data, made.mixture, made.schedule)
    assert ["'code'" in str(warning.message) for warning in caught] == [True]
    for data in (changing("3=uniform"), DataOptions()):  # other changes; Megatron's order
        mixture.write_text(mixture.read_text().replace('"step": 9', '"step": 5'))
        with pytest.raises(UserError):
            plan(**{**given, "data": data})
    with pytest.raises(UserError, match="change at step 2"):
        plan(data=changing(f"3={mixture}"))


@pytest.mark.parametrize("permutation", ["megatron", "feistel"])
def test_redistributed_weights_keep_each_domain_within_its_limit(plan, tmp_path, permutation):
    weights = {"news": 0.6, "code": 0.3, "poems": 0.1}
    tokens = plan().data.tokens
    most = 4000 / tokens["news"]
    later = {"news": 0.5, "code": 0.375, "poems": 0.125}
    stages = None if permutation == "megatron" else [MixtureStage(20, later)]
    path = tmp_path / "m.json"
    Mixture(weights, stages=stages, max_repetition={"news": most}).save(path)
    run = {"mixture": str(path), "train_iters": 40, "data": DataOptions(permutation=permutation)}
    unlimited = plan(**run)
    made = plan(**run, max_repetition_action="redistribute")
    samples = made.samples(made.schedule)
    counts = dict(zip(made.data.names, samples.counts(made.num_samples).tolist(), strict=True))
    assert 4000 / 32 - 4 < counts["news"] <= 4000 / 32
    assert made.limited == {"news": unlimited.epochs(unlimited.schedule)["news"]}
    first = dict(zip(made.data.names, made.schedule.weights_at(0), strict=True))
    assert first["code"] == pytest.approx(3 * first["poems"])
    # A run that is within its limits is unchanged.
    shorter = plan(**{**run, "train_iters": 21}, max_repetition_action="stop")
    assert not shorter.limited
    with pytest.raises(UserError, match=r"'news' would have .* at most (\d+) steps fit") as caught:
        plan(**run, max_repetition_action="stop")
    steps = int(re.findall(r"at most (\d+)", str(caught.value))[0])
    for count, fits in ((steps, True), (steps + 1, False)):
        changed = plan(**{**run, "train_iters": count})
        assert (changed.epochs(changed.schedule)["news"] <= most) == fits


def test_limits_that_cannot_hold_are_an_error(plan, tmp_path):
    path = tmp_path / "m.json"
    Mixture(dict.fromkeys(DOMAINS, 1 / 3), max_repetition=dict.fromkeys(DOMAINS, 0.01)).save(path)
    run = {"mixture": str(path), "max_repetition_action": "redistribute"}
    for changes, problem in (
        (run, "too few tokens"),  # all domains are limited
        ({**run, "data": changing("0..3=uniform")}, "linearly"),
        ({**run, "mixture": None}, "no max_repetition"),
        ({**run, "data": changing(f"3={path}"), "mixture": None}, "move the limits"),
        (
            {**run, "reload": ReloadOptions(reload_mixture=path, reload_interval=2)},
            "--reload-mixture",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            plan(**changes)
    run = {"mixture": str(path), "max_repetition_action": "stop"}
    with pytest.raises(UserError, match=r"--target-tokens 9000 / [0-9.]+ or less") as caught:
        plan(**run, target_tokens=9000)
    excess = float(re.findall(r"9000 / ([0-9.]+)", str(caught.value))[0])
    assert excess > 1
    # Limits of domains without weight that the corpus does not have change nothing.
    Mixture({**dict.fromkeys(DOMAINS, 1 / 3), "web": 0.0}, max_repetition={"web": 1.0}).save(path)
    assert not plan(**run).limited


def test_scarce_text_may_be_repeated_more_often_than_all_text(plan):
    made = plan(train_iters=100)
    tokens = {"news": 10_000, "code": 10_000, "poems": 200}
    train = {
        name: dataclasses.replace(made.data.splits["train"][name], tokens=count)
        for name, count in tokens.items()
    }
    data = dataclasses.replace(made.data, splits={**made.data.splits, "train": train})

    def warned(news: float, poems: float) -> list[str]:
        """Domains with a warning if news and poems have so many epochs."""
        schedule = MixtureSchedule.fixed((news * 10_000, 0.0, poems * 200))
        steps = round((news * 10_000 + poems * 200) / 256)
        options = dataclasses.replace(made.options, train_iters=steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_repeats(options, data, made.mixture, schedule)
        return [str(warning.message).split("'")[1] for warning in caught]

    assert warned(3, 14) == []
    assert warned(3, 16) == ["poems"]
    assert warned(5, 14) == ["news", "poems"]  # no text is abundant


def test_the_record_names_the_model_or_its_folder(plan, tmp_path):
    changed = ArchitectureOptions(num_layers=3)
    assert plan(architecture=changed).provenance.options["model"] is None
    named = preset("nano", VOCAB_SIZE, 32)
    for name, config, recorded in (
        ("nano", named, "nano"),
        ("own", dataclasses.replace(named, num_layers=3), str(tmp_path / "own")),
    ):
        folder = write_config(tmp_path / name, config)
        made = plan(model=str(folder))
        assert made.config == config
        assert made.provenance.options["model"] == recorded


@pytest.fixture
def data_path(corpus, tmp_path):
    """``data_path(value, **options)``: options for --data-path, where 'NEWS' is the news data."""

    def changes(value, **options):
        for name in DOMAINS:
            value = value.replace(name.upper(), str(corpus.prefix(name, "train")))
        model = word_tokenizer(tmp_path / "tokenizer.json")
        settings = {"data_path": value, "split": "1", "tokenizer_model": model, **options}
        return {"corpus": None, "data": DataOptions(**settings)}

    return changes


def test_plan_reads_a_data_path_with_or_without_weights(plan, data_path, tmp_path):
    made = plan(**data_path("30 NEWS 70 CODE", split="80,10,10"))
    assert made.schedule.weights_at(0) == (30.0, 70.0)
    assert made.mixture.weights == {"news": 0.3, "code": 0.7}
    assert made.data.names == ["news", "code"]
    assert [(domain.first, domain.stop) for domain in made.data.domains] == [(0, 48)] * 2
    assert made.config.vocab_size == VOCAB_SIZE
    by_size = plan(**data_path("NEWS CODE", split="80,10,10"))
    sizes = [(domain.tokens - 1) // 32 for domain in made.data.domains]
    assert by_size.schedule.weights_at(0) == tuple(sizes)
    assert (made.by_size, by_size.by_size) == (False, True)
    code = written(tmp_path / "code.json", {"code": 0.9, "news": 0.1})
    changes = {"mixture_change": ((f"2={code}", "4=uniform"),), "permutation": "epoch"}
    changed = plan(**data_path("1 NEWS 3 CODE", **changes))
    phases = (Phase(0, (1, 3)), Phase(16, (0.1, 0.9)), Phase(32, (0.5, 0.5)))
    assert changed.schedule.phases == phases


MISTAKES = """
    --model 83m
    --model llama-15m --reset-position-ids
    --seq-length 1000000
    --corpus nowhere
    --mixture nowhere.json
    --data-path x
    --corpus None
    --corpus None --data-path x
    --split 1,0,0
    --tokenizer-model t
    --permutation epoch --mixture-change
    --permutation epoch --mixture-change uniform
    --permutation epoch --mixture-change 0=uniform
    --permutation epoch --mixture-change 6=uniform
    --permutation epoch --mixture-change 3=uniform 3=uniform
    --permutation epoch --mixture-change 3=nowhere.json
    --permutation epoch --mixture-change 3..3=uniform
    --permutation epoch --mixture-change 3..7=uniform
    --permutation epoch --mixture-change 3..=uniform
    --permutation epoch --mixture-change 2..4=uniform 3=uniform
    --permutation megatron --mixture-change 3=uniform
    --permutation epoch --data-cache-path c
    --target-tokens 24575
    --target-tokens 9000000
    --profile-step-start 3
    --profile --profile-step-start 3 --profile-step-end 3
    --eval-interval 7
    --eval-iters 7
    --eval-interval 2 --eval-tokens 7
    --spike-window 9
    --online-windows 7
    --permutation epoch --online-interval 3
    --permutation epoch --online chameleon
    --permutation epoch --online odm --online-interval 3 --online-windows 7
    --permutation epoch --online chameleon --online-interval 3 --online-warmup-iters 1
    --tensor-model-parallel-size 3
    --lr 0
    --lr 1e-5 --min-lr 1e-4
    --lr-warmup-iters 6
    --mixture unknown.json
"""


@pytest.mark.parametrize("flags", [line.strip() for line in MISTAKES.strip().splitlines()])
def test_invalid_options_exit_with_status_2_and_write_nothing(
    tmp_path, monkeypatch, capsys, corpus, flags
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "unknown.json", {"news": 0.5, "unknown.json": 0.5})
    run = f"--run-dir run --corpus {corpus.root} --model nano --seq-length 32 --train-iters 6"
    argv = f"{run} --lr-warmup-iters 2 {flags}".split()
    if "--profile" not in flags and "--eval" not in flags:
        argv += ["--eval-interval", "6"]
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit) as left:
        run_tool(lambda options: bool(plan_training(options)), PretrainOptions, argv)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert any(word in line for word in re.split(r"[ =]", flags) if not word.isdecimal())
    assert set(tmp_path.iterdir()) == before


def test_a_run_too_large_for_the_machine_is_rejected(pretrain_options, tmp_path, one_rank):
    options = pretrain_options(tmp_path, global_batch_size=2**24, micro_batch_size=2**24)
    with pytest.raises(UserError, match="--micro-batch-size"):
        check_host_memory(plan_training(options), one_rank)
    check_host_memory(plan_training(dataclasses.replace(options, micro_batch_size=4)), one_rank)
