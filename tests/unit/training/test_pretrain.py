"""tools/pretrain_gpt.py on one rank: from a corpus to a run on disk, and on from there."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord, SampledTokens, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training import step, trainer
from megatron_chameleon.training.options import ValidationOptions
from megatron_chameleon.training.trainer import pretrain
from tests.distributed.toy_hooks import MixtureChanger
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer

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
        assert tokens.target == pytest.approx(run.tokens / 3)
        assert abs(tokens.actual - tokens.target) <= 32  # at most one sample
        assert tokens.epochs == tokens.actual / corpus.domains[name].train.tokens
    assert sum(tokens.actual for tokens in run.domain_tokens.values()) == run.tokens


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
    for name, sampled in run.domain_tokens.items():
        assert sampled.target == pytest.approx(4 * TOKENS_PER_STEP / 3)
        assert abs(sampled.actual - sampled.target) < 32
        assert sampled.actual == metrics_of(run_dir)[-1]["drawn"][name]["got"]
    assert sum(sampled.actual for sampled in run.domain_tokens.values()) == run.tokens
    pretrain(pretrain_options(run_dir))
    assert TrainingRun.load(run_dir).status == "finished"
    assert TrainingRun.load(run_dir).domain_tokens == TrainingRun.load(finished_run).domain_tokens
    assert losses_of(run_dir) == losses_of(finished_run)


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


def test_metrics_and_run_say_what_was_asked_and_got(pretrain_options, corpus, tmp_path):
    weights = {"poems": 1.0, "news": 0.0, "code": 0.0}
    (tmp_path / "poems.json").write_text(json.dumps({"weights": weights}))
    change = (("3=" + str(tmp_path / "poems.json"),),)
    data = DataOptions(mixture_change=change, permutation="feistel")
    boundaries = DocumentBoundaryOptions(eod_mask_loss=True)  # tokens without a loss are got too
    pretrain(pretrain_options(tmp_path / "run", data=data, boundaries=boundaries))
    sampled = [record["drawn"] for record in metrics_of(tmp_path / "run")]
    assert [{n: d["got"] for n, d in record.items()} for record in sampled] == [
        {"news": 5 * 32, "code": 5 * 32, "poems": 6 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 8 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 16 * 32},
        {"news": 8 * 32, "code": 8 * 32, "poems": 32 * 32},
    ]
    assert sampled[-1]["poems"]["asked"] == 32 * 32
    run = TrainingRun.load(tmp_path / "run")
    assert run.mixture == {"news": 0.0, "code": 0.0, "poems": 1.0}
    tokens = corpus.domains["poems"].train.tokens
    assert run.domain_tokens["poems"] == SampledTokens(1.0, 1024.0, 1024, 1024 / tokens)


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
