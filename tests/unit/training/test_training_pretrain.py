"""tools/pretrain_gpt.py on one rank: from a corpus to a run on disk, and on from there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil

import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord, DrawnTokens, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.console import Output, escaped
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training import step, trainer
from megatron_chameleon.training.options import GuardOptions, OptimizerOptions, ValidationOptions
from megatron_chameleon.training.trainer import pretrain
from tests.distributed.toy_hooks import LossWeigher, MixtureChanger
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer, write_small_corpus

SHAPE = ModelShape(model_size("nano"), VOCAB_SIZE, max_sequence_length=32)
TOKENS_PER_STEP = 8 * 32


def metrics_of(run_dir):
    return list(TrainingRun.load(run_dir).metrics())


def losses_of(run_dir):
    return {r["step"]: (r["loss"], r["domain_loss"], r["grad_norm"]) for r in metrics_of(run_dir)}


def weights_of(checkpoint):
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        reader = open_reader(CheckpointRecord.load(checkpoint), layout)
        return {name: p.detach().clone() for name, p in reader.model.named_parameters()}


def same_weights(first, second):
    assert list(first) == list(second)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_run_says_what_it_is_and_did(finished_run, corpus):
    run = TrainingRun.load(finished_run)
    assert (run.status, run.step, run.train_iters) == ("finished", 6, 6)
    assert run.tokens == 6 * TOKENS_PER_STEP
    assert run.model == dataclasses.asdict(SHAPE)
    assert run.parameters == SHAPE.num_parameters
    assert run.mixture == dict.fromkeys(DOMAINS, 1 / 3)
    assert run.mixture_method == "uniform"
    assert run.provenance.inputs["corpus"] == corpus.hash
    assert run.cost.flops == training_flops(SHAPE, run.tokens, 32)
    assert run.cost.wall_seconds > 0
    assert run.checkpoints == ["checkpoints/step-00000003", "checkpoints/step-00000006"]
    for name, tokens in run.domain_tokens.items():
        assert tokens.asked == pytest.approx(run.tokens / 3)
        assert abs(tokens.got - tokens.asked) <= 32  # at most one sample
        assert tokens.epochs == tokens.got / corpus.domains[name].train.tokens
    assert sum(tokens.got for tokens in run.domain_tokens.values()) == run.tokens


def test_every_interval_is_logged_and_every_checkpoint(finished_run):
    records = metrics_of(finished_run)
    assert [record["step"] for record in records] == [2, 3, 4, 6]
    assert [record["tokens"] for record in records] == [s * TOKENS_PER_STEP for s in (2, 3, 4, 6)]
    for record, steps in zip(records, [2, 1, 1, 2], strict=True):
        tokens = record["domain_tokens"]
        assert sum(tokens.values()) == steps * TOKENS_PER_STEP
        mean = sum(record["domain_loss"][name] * n for name, n in tokens.items())
        assert record["loss"] == pytest.approx(mean / sum(tokens.values()))
        assert record["tokens_per_second"] > 0
    assert records[0]["lr"] == 1e-2  # step 2 ends the warm-up
    assert records[-1]["lr"] == pytest.approx(1e-4)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3


def test_a_checkpoint_says_what_it_is(finished_run, corpus):
    record = CheckpointRecord.load(step_folder(finished_run, 3))
    record.verify()
    assert (record.step, record.samples) == (3, 24)
    assert sum(record.domain_tokens.values()) == 3 * TOKENS_PER_STEP
    assert record.model == dataclasses.asdict(SHAPE)
    assert record.corpus_hash == corpus.hash
    assert record.tokenizer_hash == corpus.tokenizer.sha256
    assert record.layout["tensor_model_parallel_size"] == 1
    assert record.hash != CheckpointRecord.load(step_folder(finished_run, 6)).hash


def test_training_moves_every_weight_from_where_the_seed_put_it(finished_run):
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        model = build_model(SHAPE, layout, seed=1234)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, weight in weights_of(step_folder(finished_run, 6)).items():
        assert not torch.equal(weight, start[name]), name
        assert (weight - start[name]).abs().max() < 0.1, name


def test_a_finished_run_is_left_alone(pretrain_options, trained_run, capsys):
    def contents():
        return {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}

    before = contents()
    pretrain(pretrain_options(trained_run))
    assert capsys.readouterr().out == f"{trained_run} is finished at step 6; nothing to do\n"
    assert contents() == before


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    pretrain_options, trained_run, finished_run, capsys
):
    shutil.rmtree(step_folder(trained_run, 6))  # killed after step 3
    pretrain(pretrain_options(trained_run))
    assert "resuming at step 3: nano" in capsys.readouterr().out
    assert losses_of(trained_run) == losses_of(finished_run)
    run = TrainingRun.load(trained_run)
    assert run.status == "finished"
    assert run.domain_tokens == TrainingRun.load(finished_run).domain_tokens
    resumed, straight = (weights_of(step_folder(r, 6)) for r in (trained_run, finished_run))
    assert same_weights(resumed, straight)


def test_a_continued_run_costs_what_all_its_parts_cost(pretrain_options, trained_run):
    before = TrainingRun.load(trained_run).cost
    shutil.rmtree(step_folder(trained_run, 6))
    pretrain(pretrain_options(trained_run))
    after = TrainingRun.load(trained_run).cost
    assert after.flops == before.flops + training_flops(SHAPE, 3 * TOKENS_PER_STEP, 32)
    assert after.wall_seconds > before.wall_seconds


def test_control_c_is_recorded_and_can_be_gone_on_from(
    pretrain_options, finished_run, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    calls = []
    original = step.train_step

    def interrupted(*arguments, **more):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(pretrain_options(run_dir))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step) == ("interrupted", 4)
    assert run.checkpoints == ["checkpoints/step-00000003"]
    for name, drawn in run.domain_tokens.items():
        assert drawn.asked == pytest.approx(4 * TOKENS_PER_STEP / 3)
        assert abs(drawn.got - drawn.asked) < 32
        assert drawn.got == metrics_of(run_dir)[-1]["drawn"][name]["got"]
    assert sum(drawn.got for drawn in run.domain_tokens.values()) == run.tokens
    pretrain(pretrain_options(run_dir))
    assert TrainingRun.load(run_dir).status == "finished"
    assert TrainingRun.load(run_dir).domain_tokens == TrainingRun.load(finished_run).domain_tokens
    assert losses_of(run_dir) == losses_of(finished_run)


def test_what_was_drawn_is_told_of_the_step_it_was_logged_at(
    pretrain_options, tmp_path, monkeypatch
):
    """Interrupted after step 5, whose batches nobody has counted yet."""
    calls = []
    original = step.train_step

    def interrupted(*arguments, **more):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(*arguments, **more)

    monkeypatch.setattr(trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain(pretrain_options(tmp_path / "run"))
    run = TrainingRun.load(tmp_path / "run")
    assert run.step == 5
    asked, got = (
        sum(getattr(drawn, kind) for drawn in run.domain_tokens.values())
        for kind in ("asked", "got")
    )
    assert got == 4 * TOKENS_PER_STEP
    assert asked == pytest.approx(got)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_distributed_optimizer_goes_on_as_if_nothing_had_happened(
    pretrain_options, tmp_path, bf16
):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = {"parallel": TrainingParallelOptions(use_distributed_optimizer=True), "bf16": bf16}
    pretrain(pretrain_options(straight, **options))
    shutil.copytree(straight, resumed)
    shutil.rmtree(step_folder(resumed, 6))
    pretrain(pretrain_options(resumed, **options))
    assert losses_of(resumed) == losses_of(straight)
    assert same_weights(weights_of(step_folder(resumed, 6)), weights_of(step_folder(straight, 6)))


def test_a_learning_rate_that_ruins_the_model_ends_the_run(pretrain_options, tmp_path):
    run_dir = tmp_path / "run"
    optimizer = OptimizerOptions(lr=1e30, min_lr=0.0, lr_warmup_iters=0)
    guards = GuardOptions(max_consecutive_skipped_steps=3)
    with pytest.raises(UserError, match=r"3 steps in a row were skipped, 2 to 4, .* is (nan|inf)"):
        pretrain(pretrain_options(run_dir, optimizer=optimizer, guards=guards, log_interval=1))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.skipped_steps) == ("failed", 4, 3)
    assert run.checkpoints == []  # there is nothing worth keeping of it
    lines = (run_dir / METRICS_NAME).read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [json.loads(line)["skipped_steps"] for line in lines] == [0, 1, 2, 3]


def test_a_failed_run_goes_on_from_its_last_good_checkpoint(
    pretrain_options, trained_run, finished_run
):
    shutil.rmtree(step_folder(trained_run, 6))
    failed = dataclasses.replace(TrainingRun.load(trained_run), status="failed", step=5)
    failed.save()
    pretrain(pretrain_options(trained_run))
    assert losses_of(trained_run) == losses_of(finished_run)


def test_a_domain_of_weight_zero_is_not_drawn(pretrain_options, tmp_path):
    mixture, run_dir = tmp_path / "m.json", tmp_path / "run"
    mixture.write_text(json.dumps({"weights": {"news": 0.75, "code": 0.0, "poems": 0.25}}))
    pretrain(pretrain_options(run_dir, mixture=str(mixture), train_iters=3))
    run = TrainingRun.load(run_dir)
    got = {name: tokens.got for name, tokens in run.domain_tokens.items()}
    assert got == {"news": 18 * 32, "code": 0, "poems": 6 * 32}
    assert run.domain_tokens["code"].epochs == 0.0
    assert all("code" not in record["domain_loss"] for record in run.metrics())


def test_a_data_path_trains_as_the_corpus_that_its_files_are_of(
    pretrain_options, finished_run, corpus, tmp_path
):
    data = DataOptions(
        data_path=" ".join(f"1 {corpus.prefix(name, 'train')}" for name in DOMAINS),
        split="1,0,0",
        tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json"),
        data_cache_path=tmp_path / "cache",
    )
    for run in ("run", "with-the-cache"):
        pretrain(pretrain_options(tmp_path / run, corpus=None, data=data))
        found, expected = metrics_of(tmp_path / run), metrics_of(finished_run)
        assert [record["loss"] for record in found] == [record["loss"] for record in expected]
    assert len(list((tmp_path / "cache").iterdir())) == len(DOMAINS)


def test_a_corpus_whose_tokens_have_changed_is_found_when_asked(pretrain_options, tmp_path):
    corpus = write_small_corpus(tmp_path / "corpus")
    path = corpus.prefix("code", "valid").with_suffix(".bin")
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    options = {"corpus": corpus.root, "data": DataOptions(verify_corpus=True)}
    with pytest.raises(UserError, match=r"code\.bin.* has changed"):
        pretrain(pretrain_options(tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_metrics_and_run_say_what_was_asked_and_got(pretrain_options, corpus, tmp_path):
    weights = {"poems": 1.0, "news": 0.0, "code": 0.0}
    (tmp_path / "poems.json").write_text(json.dumps({"weights": weights}))
    change = (("3=" + str(tmp_path / "poems.json"),),)
    data = DataOptions(mixture_change=change, permutation="feistel")
    boundaries = DocumentBoundaryOptions(eod_mask_loss=True)  # tokens without a loss are got too
    pretrain(pretrain_options(tmp_path / "run", data=data, boundaries=boundaries))
    drawn = [record["drawn"] for record in metrics_of(tmp_path / "run")]
    assert [{n: d["got"] for n, d in record.items()} for record in drawn] == [
        {"news": 5 * 32, "code": 5 * 32, "poems": 6 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 8 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 16 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 32 * 32},
    ]
    assert drawn[-1]["poems"]["asked"] == 32 * 32
    run = TrainingRun.load(tmp_path / "run")
    assert run.mixture == {"news": 0.0, "code": 0.0, "poems": 1.0}
    tokens = corpus.domains["poems"].train.tokens
    assert run.domain_tokens["poems"] == DrawnTokens(1.0, 1024.0, 1024, 1024 / tokens)


def test_bf16_learns_nearly_as_fp32(pretrain_options, finished_run, tmp_path):
    pretrain(pretrain_options(tmp_path / "run", bf16=True))
    full, half = losses_of(finished_run), losses_of(tmp_path / "run")
    assert full.keys() == half.keys()
    for logged in full:
        assert half[logged][0] == pytest.approx(full[logged][0], abs=0.05)
    assert half[6] != full[6]


def test_overwrite_trains_anew(pretrain_options, trained_run, finished_run):
    pretrain(pretrain_options(trained_run, overwrite=True, seed=7, train_iters=3))
    run = TrainingRun.load(trained_run)
    assert (run.step, run.status) == (3, "finished")
    assert run.checkpoints == ["checkpoints/step-00000003"]
    assert losses_of(trained_run)[3] != losses_of(finished_run)[3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"micro_batch_size": 3}, "multiple of 3"),
        ({"parallel": TrainingParallelOptions(2)}, r"1 rank\(s\) cannot be laid out as tensor 2"),
        ({"train_iters": 0}, "--train-iters 0"),
    ],
)
def test_a_mistake_writes_nothing(pretrain_options, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        pretrain(pretrain_options(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mistake_with_overwrite_deletes_nothing(pretrain_options, trained_run, corpus, tmp_path):
    def refused(problem, hook_factory=None, **changes):
        with pytest.raises(UserError, match=problem):
            pretrain(pretrain_options(trained_run, overwrite=True, **changes), hook_factory)
        assert contents(trained_run) == before

    before = contents(trained_run)
    refused("multiple of 3", micro_batch_size=3)
    refused("MixtureChanger changes the mixture", MixtureChanger)
    refused("run.json is in .* which --overwrite deletes", mixture=str(trained_run / "run.json"))
    refused("trained is in .* --overwrite deletes", pretrained_checkpoint=trained_run)
    cache = DataOptions(data_cache_path=trained_run / "cache")
    refused("--data-cache-path .*cache is in .* --overwrite deletes", data=cache)
    no_valid_text = DataOptions(
        data_path=" ".join(str(corpus.prefix(name, "train")) for name in DOMAINS),
        split="1,0,0",
        tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json"),
    )
    validation = ValidationOptions(eval_interval=2)
    refused("or give --eval-interval 0", corpus=None, data=no_valid_text, validation=validation)
    damaged = shutil.copytree(trained_run, tmp_path / "damaged")
    for weights in damaged.glob("checkpoints/step-*/*.distcp"):
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    refused("has changed since it was written", pretrained_checkpoint=damaged)
    changed = shutil.copytree(corpus.root, tmp_path / "corpus")
    tokens = changed / corpus.prefix("code", "valid").relative_to(corpus.root).with_suffix(".bin")
    tokens.write_bytes(b"\0" + tokens.read_bytes()[1:])
    refused("has changed", corpus=changed, data=DataOptions(verify_corpus=True))


def test_a_mistake_cuts_nothing_of_a_run_that_goes_on(pretrain_options, trained_run):
    (trained_run / "checkpoints" / "latest").write_text("step-00000003\n")
    before = contents(trained_run)
    with pytest.raises(UserError, match="LossWeigher"):
        pretrain(pretrain_options(trained_run), LossWeigher)
    assert contents(trained_run) == before


def test_a_run_killed_after_its_last_checkpoint_is_finished_by_the_same_command(
    pretrain_options, trained_run, finished_run, capsys
):
    finished = TrainingRun.load(finished_run)
    first = finished.checkpoints[:1]
    dataclasses.replace(
        TrainingRun.load(trained_run), status="running", step=4, tokens=1024, checkpoints=first
    ).save()
    pretrain(pretrain_options(trained_run))
    assert capsys.readouterr().out == f"{trained_run} is finished at step 6; nothing to do\n"
    run = TrainingRun.load(trained_run)
    for field in ("status", "step", "tokens", "checkpoints", "domain_tokens", "mixture_phases"):
        assert getattr(run, field) == getattr(finished, field)
    assert run.cost.flops == finished.cost.flops


def test_standard_output_on_a_full_disk_costs_nothing_but_the_lines(
    pretrain_options, finished_run, tmp_path
):
    run_dir = tmp_path / "run"
    with open("/dev/full", "w") as full:
        stream = Output(full.fileno(), "utf-8", escaped)
        with contextlib.redirect_stdout(stream):
            pretrain(pretrain_options(run_dir))
            pretrain(pretrain_options(run_dir))
    assert stream.lost is not None
    assert TrainingRun.load(run_dir).status == "finished"
    assert losses_of(run_dir) == losses_of(finished_run)


def test_a_folder_that_cannot_be_made_is_told(pretrain_options, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot write .*; free space or choose another folder"):
        pretrain(pretrain_options(tmp_path / "file" / "run"))
