from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.blend.token_data import corpus_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.data import DataOptions, Permutation
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.logging import LoggingOptions
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.profiling import ProfilingOptions
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.options.validation import ValidationOptions
from megatron_chameleon.training.dry_step import check_host_memory
from megatron_chameleon.training.plan import plan_training, warn_of_repeats
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer
from tests.unit.blend.token_files import write_file
from tests.unit.corpus.tokenizer_samples import write_pairs


@pytest.fixture
def plan(pretrain_options, tmp_path):
    """``plan(**changes)``: the plan of six steps, with some options changed."""

    def make(**changes):
        return plan_training(pretrain_options(tmp_path / "run", **changes))

    return make


def written(path: Path, weights: dict[str, float]) -> str:
    path.write_text(json.dumps({"weights": weights}))
    return str(path)


def test_a_plan_holds_what_the_options_name(plan, corpus):
    made = plan()
    assert made.data == corpus_tokens(corpus)
    assert made.schedule == MixtureSchedule.fixed([1 / 3] * 3)
    assert made.mixture == Mixture.uniform(list(DOMAINS))
    assert made.shape == ModelShape(model_size("nano"), VOCAB_SIZE, max_sequence_length=32)
    assert made.tokens_per_step == 8 * 32
    assert made.provenance.inputs == {"corpus": corpus.hash, "mixture": made.mixture.hash}


def test_planning_writes_nothing(plan, tmp_path):
    plan()
    assert list(tmp_path.iterdir()) == []


def test_weights_come_from_the_file_in_the_corpus_order(plan, tmp_path):
    mixture = written(tmp_path / "m.json", {"poems": 0.5, "news": 0.2, "code": 0.3})
    assert plan(mixture=mixture).schedule.weights_at(0) == (0.2, 0.3, 0.5)


def test_changes_are_put_in_order_and_begin_with_their_step(plan, tmp_path):
    poems = written(tmp_path / "p.json", {"poems": 1.0, "news": 0.0, "code": 0.0})
    made = plan(data=changing("4=uniform", f"2={poems}"))
    assert made.schedule.phases == (
        Phase(0, (1 / 3,) * 3),
        Phase(2 * 8, (0.0, 0.0, 1.0)),
        Phase(4 * 8, (1 / 3,) * 3),
    )


def test_a_domain_that_comes_more_than_four_times_is_called_out(plan, corpus, tmp_path):
    tokens = corpus.domains["news"].train.tokens
    mixture = written(tmp_path / "m.json", {"news": 1.0, "code": 0.0, "poems": 0.0})
    steps = math.ceil(4.2 * tokens / (8 * 32))
    optimizer = OptimizerOptions(lr_warmup_iters=2)
    made = plan(mixture=mixture, train_iters=steps, optimizer=optimizer)
    with pytest.warns(MixtureWarning, match=rf"'news' will be repeated 4\.\d times.* {tokens:,} "):
        warn_of_repeats(made, made.schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fewer = plan(mixture=mixture, train_iters=steps - 10, optimizer=optimizer)
        warn_of_repeats(fewer, fewer.schedule)
        warn_of_repeats(made, MixtureSchedule.fixed([1.0, 1.0, 1.0]))


def test_a_data_path_has_its_own_weights_and_tokenizer(plan, corpus, tmp_path):
    prefixes = [str(corpus.prefix(name, "train")) for name in ("news", "code")]
    data = DataOptions(
        data_path=f"30 {prefixes[0]} 70 {prefixes[1]}",
        split="80,10,10",
        tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json"),
    )
    made = plan(corpus=None, data=data)
    assert made.schedule.weights_at(0) == (30.0, 70.0)
    assert made.mixture.weights == {"news": 0.3, "code": 0.7}
    assert made.data.names == ["news", "code"]
    assert [(domain.first, domain.stop) for domain in made.data.domains] == [(0, 48)] * 2
    assert made.shape.vocab_size == VOCAB_SIZE
    alone = plan(corpus=None, data=dataclasses.replace(data, data_path=" ".join(prefixes)))
    sizes = [(domain.tokens - 1) // 32 for domain in made.data.domains]
    assert alone.schedule.weights_at(0) == tuple(sizes)
    assert (made.by_size, alone.by_size) == (False, True)


@pytest.fixture
def data_path(corpus, tmp_path):
    """``data_path(given, **options)``: the changes of options for such a --data-path."""

    def changes(given, **options):
        for name in DOMAINS:
            given = given.replace(name.upper(), str(corpus.prefix(name, "train")))
        model = word_tokenizer(tmp_path / "tokenizer.json")
        settings = {"data_path": given, "split": "1", "tokenizer_model": model, **options}
        return {"corpus": None, "data": DataOptions(**settings)}

    return changes


def test_a_data_path_may_be_drawn_from_by_its_sizes_for_many_epochs(plan, data_path):
    made = plan(**data_path("NEWS CODE"), train_iters=400)
    sizes = made.schedule.weights_at(0)
    assert made.by_size
    assert made.num_samples > 4 * sum(sizes)
    with pytest.warns(MixtureWarning, match=r"will be repeated \d+\.\d times") as repeated:
        warn_of_repeats(made, made.schedule)
    told = [str(warning.message).split(":")[0] for warning in repeated]
    times = f"{made.num_samples / sum(sizes):.0f}"
    assert [line.split("repeated ")[1].split(".")[0] for line in told] == [times, times]


def test_the_weights_of_a_data_path_may_change(plan, data_path, tmp_path):
    code = written(tmp_path / "code.json", {"code": 0.9, "news": 0.1})
    changes = {"mixture_change": ((f"2={code}", "4=uniform"),), "permutation": "epoch"}
    made = plan(**data_path("1 NEWS 3 CODE", **changes))
    assert made.schedule.phases == (Phase(0, (1, 3)), Phase(16, (0.1, 0.9)), Phase(32, (0.5, 0.5)))
    other = written(tmp_path / "other.json", {"songs": 1.0})
    changes["mixture_change"] = ((f"2={other}",),)
    with pytest.raises(UserError, match=r"for 'songs', .* of --data-path; .* are news, code"):
        plan(**data_path("1 NEWS 3 CODE", **changes))


@pytest.mark.parametrize(
    ("given", "tokens"), [("NEWS", r"\d+"), ("NEWS CODE", r"\d+"), ("NEWS SMALL", "7")]
)
def test_data_sets_of_less_than_a_sequence_are_refused_and_not_dropped(
    plan, data_path, tmp_path, given, tokens
):
    small = write_file(tmp_path / "small", [3, 4])
    changes = data_path(given.replace("SMALL", str(small)))
    seq_length = 32 if "SMALL" in given else 10**6
    told = rf"domain '\w+' of --data-path has {tokens} tokens .* fewer than one sequence of"
    with pytest.raises(UserError, match=told):
        plan(**changes, seq_length=seq_length)


def test_a_tiktoken_file_gets_its_pattern(plan, data_path, tmp_path):
    file = write_pairs(tmp_path / "pairs.tiktoken")
    with pytest.raises(UserError, match="--tiktoken-pattern"):
        plan(**data_path("NEWS", tokenizer_model=file))
    hashes = {
        plan(**data_path("NEWS", tokenizer_model=file, tiktoken_pattern=pattern)).data.hash
        for pattern in ("gpt2", r"\S+|\s+")
    }
    assert len(hashes) == 2


def test_a_domain_of_weight_zero_may_be_too_small(plan, tmp_path):
    with pytest.warns(MixtureWarning, match="the mixture says nothing of code, poems"):
        made = plan(mixture=written(tmp_path / "m.json", {"news": 1.0}))
    assert made.schedule.weights_at(0) == (1.0, 0.0, 0.0)


FREE: tuple[Permutation, ...] = ("epoch", "feistel")


def changing(*changes: str) -> DataOptions:
    return DataOptions(mixture_change=(changes,), permutation="epoch")


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"seq_length": 0}, "--seq-length 0: "),
    ({"train_iters": -3}, "--train-iters -3: "),
    ({"global_batch_size": 0}, "--global-batch-size 0: "),
    ({"micro_batch_size": 0}, "--micro-batch-size 0: "),
    ({"log_interval": 0}, "--log-interval 0: "),
    ({"save_interval": 0}, "--save-interval 0: "),
    ({"seed": -1}, "--seed -1: "),
    ({"seed": 2**32}, "--seed 4294967296: "),
    ({"model_size": "83m"}, "--model-size 83m: there is no such size; choose from 60m, 82m, "),
    ({"seq_length": 10**6}, "domain 'news' of .* tokens to train on, fewer than one sequence"),
    ({"corpus": Path("nowhere")}, r"nowhere/corpus\.json does not exist"),
    ({"mixture": "nowhere.json"}, r"nowhere\.json does not exist"),
    ({"corpus": None}, "give either --corpus or --data-path"),
    ({"data": DataOptions(data_path="x")}, "give either --corpus or --data-path"),
    ({"corpus": None, "data": DataOptions(data_path="x")}, "--data-path needs --tokenizer-model"),
    (
        {"corpus": None, "data": DataOptions(data_path="x"), "mixture": "uniform"},
        "--mixture uniform: --data-path has its own weights",
    ),
    (
        {"corpus": None, "data": DataOptions(data_path="x", verify_corpus=True)},
        "--verify-corpus needs a --corpus",
    ),
    *(
        ({"data": changing(change)}, f"--mixture-change {change}: give STEP=MIXTURE, STEP from 1")
        for change in ("uniform", "3", "=uniform", "3=", "0=uniform", "6=uniform", "-1=uniform")
    ),
    ({"data": changing("3=uniform", "3=uniform")}, "--mixture-change 3=.*: there are two"),
    ({"data": changing("3=nowhere.json")}, r"nowhere\.json does not exist"),
    (
        {"data": DataOptions(mixture_change=(("3=uniform",),))},
        "Megatron's order .* --permutation epoch",
    ),
    ({"data": DataOptions(split="1,0,0")}, "--split 1,0,0 is for --data-path; --corpus .* leave"),
    ({"data": DataOptions(tokenizer_model=Path("t"))}, "--tokenizer-model t is for --data-path"),
    ({"data": DataOptions(tiktoken_pattern="gpt2")}, "--tiktoken-pattern gpt2 is for --data-path"),
    ({"data": DataOptions(eod_token="</s>")}, "--eod-token </s> is for --data-path"),
    (
        {"data": DataOptions(mixture_change=((),), permutation="epoch")},
        "--mixture-change: give STEP=MIXTURE, or leave it out",
    ),
    *(
        (
            {"data": DataOptions(data_cache_path=Path("c"), permutation=permutation)},
            f"--data-cache-path c: --permutation {permutation} has no indices to keep; leave it",
        )
        for permutation in FREE
    ),
    *(
        ({"profiling": options}, rf"--{flag} 3: there is no trace without --profile; leave it out")
        for options, flag in (
            (ProfilingOptions(profile_step_start=3), "profile-step-start"),
            (ProfilingOptions(profile_step_end=3), "profile-step-end"),
        )
    ),
    ({"validation": ValidationOptions(7)}, "--eval-interval 7: --train-iters 6 end before the fir"),
    ({"validation": ValidationOptions(0, 7)}, "--eval-iters 7: --eval-interval 0 validates never"),
    ({"validation": ValidationOptions(eval_iters=7)}, "--eval-iters 7: --train-iters 6 end before"),
    ({"guards": GuardOptions(spike_window=9)}, "--spike-window 9: only --spike-factor has a wind"),
    ({"logging": LoggingOptions(wandb_exp_name="x")}, "--wandb-exp-name x: without --wandb-proj"),
    (
        {"parallel": TrainingParallelOptions(distributed_timeout_minutes=0)},
        "--distributed-timeout-minutes 0: ",
    ),
    ({"parallel": TrainingParallelOptions(0)}, "--tensor-model-parallel-size 0: "),
    ({"parallel": TrainingParallelOptions(3)}, "3 does not divide 4 attention heads; 1, 2, 4 do"),
    ({"parallel": TrainingParallelOptions(1, 3)}, "3 does not divide 4 layers; 1, 2, 4 do"),
    (
        {"parallel": TrainingParallelOptions(2, sequence_parallel=True), "seq_length": 31},
        "sequences of 31 tokens are not a multiple of --tensor-model-parallel-size 2",
    ),
]

BAD_OPTIMIZERS: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.0, "min_lr": 0.0}, "--lr 0.0: "),
    ({"lr": 1e-5, "min_lr": 1e-4}, "--lr 1e-05 --min-lr 0.0001: "),
    ({"lr": -1.0, "min_lr": -2.0}, "--lr -1.0: "),
    ({"lr": math.nan}, "--lr nan: "),
    ({"lr": math.inf}, "--lr inf: "),
    ({"min_lr": math.nan}, "--min-lr nan"),
    ({"lr_warmup_iters": 6}, "--lr-warmup-iters 6 leaves nothing of --train-iters 6"),
    ({"lr_warmup_iters": -1}, "--lr-warmup-iters -1: "),
    ({"weight_decay": -0.1}, "--weight-decay -0.1: "),
    ({"clip_grad": math.inf}, "--clip-grad inf: "),
    ({"adam_eps": math.nan}, "--adam-eps nan: "),
    ({"adam_beta1": 1.0}, "--adam-beta1 1.0: "),
    ({"adam_beta2": -0.5}, "--adam-beta2 -0.5: "),
]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        *BAD_OPTIONS,
        *(
            ({"optimizer": dataclasses.replace(OptimizerOptions(lr_warmup_iters=2), **bad)}, told)
            for bad, told in BAD_OPTIMIZERS
        ),
    ],
)
def test_every_bad_option_has_one_clear_line(plan, tmp_path, monkeypatch, changes, problem):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match=problem) as refused:
        plan(**changes)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_something_are_taken(plan, monkeypatch):
    plan(guards=GuardOptions(spike_factor=6.0, spike_window=9))
    plan(validation=ValidationOptions(eval_interval=6, eval_iters=1))
    plan(validation=ValidationOptions(eval_interval=0))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    plan(logging=LoggingOptions(wandb_exp_name="x"))


@pytest.mark.parametrize(
    "change", [{"corpus": "."}, {"pretrained_checkpoint": "run"}, {"mixture": "run/m.json"}]
)
def test_what_the_run_reads_is_not_overwritten(plan, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    ((name, path),) = change.items()
    given = path if name == "mixture" else Path(path)
    if path == ".":  # not where the run is, but above it: that is not deleted
        with pytest.raises(UserError, match="does not exist"):
            plan(overwrite=True, **{name: given})
        return
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {path} lies in .*/run, which"):
        plan(overwrite=True, **{name: given})


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"news": -1.0}, r"m\.json: weight of 'news' is -1\.0"),
        ({"news": math.nan}, "news.* nan"),
        ({"news": 0.0, "code": 0.0}, "all weights are zero"),
        ({"news": 0.5, "songs": 0.5}, "weight for 'songs', .* its domains are news, code, poems"),
    ],
)
def test_a_bad_mixture_has_one_clear_line(plan, tmp_path, weights, problem):
    with pytest.raises(UserError, match=problem):
        plan(mixture=written(tmp_path / "m.json", weights))


def test_a_run_that_the_machine_cannot_hold_is_refused_before_it_takes_memory(
    pretrain_options, tmp_path, one_rank
):
    options = pretrain_options(tmp_path, global_batch_size=2**24, micro_batch_size=2**24)
    with pytest.raises(UserError, match="--micro-batch-size"):
        check_host_memory(plan_training(options), one_rank)
    check_host_memory(plan_training(pretrain_options(tmp_path)), one_rank)
