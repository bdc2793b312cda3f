"""Test whole runs on one rank: records, exact resume, stop signals, validation, hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME, step_folder
from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.blend.sampler import prefetch
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.report.compare_methods import validation_curve
from megatron_chameleon.training import trainer
from megatron_chameleon.training.checkpointing import find_progress
from megatron_chameleon.training.options import (
    GuardOptions,
    ProfilingOptions,
    ValidationOptions,
)
from megatron_chameleon.training.trainer import pretrain
from tests.device_reads import device_reads
from tests.small_corpus import DOMAINS, VOCAB_SIZE, word_tokenizer
from tests.toy_hooks import LossWeigher, MixtureChanger
from tests.unit.training.runs import OVERLAPPED, before_steps, contents, losses, metrics, record_at

SHAPE = preset("nano", VOCAB_SIZE, max_sequence_length=32)
TOKENS_PER_STEP = 8 * 32


def test_finished_run_records_tokens_losses_and_checkpoints(finished_run, corpus):
    run = TrainingRun.load(finished_run)
    assert (run.status, run.step, run.train_iters) == ("finished", 6, 6)
    assert run.tokens == 6 * TOKENS_PER_STEP
    assert run.model == dataclasses.asdict(SHAPE)
    assert run.mixture == dict.fromkeys(DOMAINS, 1 / 3)
    assert run.provenance.inputs["corpus"] == corpus.hash
    assert run.cost.flops == training_flops(SHAPE, run.tokens, 32)
    assert run.checkpoints == ["checkpoints/step-00000003", "checkpoints/step-00000006"]
    for name, tokens in run.domain_tokens.items():
        assert tokens.target == pytest.approx(run.tokens / 3)
        assert abs(tokens.actual - tokens.target) <= 32  # the counts differ by at most one sample
        assert tokens.epochs == tokens.actual / corpus.domains[name].train.tokens
    assert sum(tokens.actual for tokens in run.domain_tokens.values()) == run.tokens
    records = metrics(finished_run)
    assert list(records) == [2, 3, 4, 6]
    for record, steps in zip(records.values(), [2, 1, 1, 2], strict=True):
        assert record["tokens"] == record["step"] * TOKENS_PER_STEP
        tokens = record["domain_tokens"]
        assert sum(tokens.values()) == steps * TOKENS_PER_STEP
        mean = sum(record["domain_loss"][name] * n for name, n in tokens.items())
        assert record["loss"] == pytest.approx(mean / sum(tokens.values()))
    assert records[2]["lr"] == 1e-2  # step 2 ends the warm-up
    assert records[6]["lr"] == pytest.approx(1e-4)
    assert records[6]["loss"] < records[2]["loss"] - 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"parallel": OVERLAPPED},
        {"parallel": OVERLAPPED, "bf16": True, "target_tokens": 4 * 6 * TOKENS_PER_STEP},
    ],
    ids=["dropout", "sharded", "bf16"],
)
def test_killed_run_resumes_exactly(pretrain_options, corpus, tmp_path, capsys, changes):
    """The resumed command also makes a dry step, which changes nothing."""
    options, is_cut = pretrain_options(tmp_path / "run", **changes), "target_tokens" in changes
    pretrain(options)
    assert ("is cut to 25% of" in capsys.readouterr().out) == is_cut
    for name, tokens in TrainingRun.load(options.run_dir).domain_tokens.items():
        used = corpus.domains[name].train.tokens // (4 if is_cut else 1)
        assert tokens.epochs == tokens.actual / used
    whole, resumed = tmp_path / "whole", options.run_dir
    shutil.copytree(resumed, whole)
    shutil.rmtree(step_folder(resumed, 6))  # as if killed after step 3
    pretrain(dataclasses.replace(options, dry_first_step="on"))
    assert losses(resumed) == losses(whole)
    # The hash covers weights, moments and the learning-rate schedule.
    assert record_at(resumed, 6).hash == record_at(whole, 6).hash
    assert TrainingRun.load(resumed).domain_tokens == TrainingRun.load(whole).domain_tokens
    assert TrainingRun.load(resumed).status == "finished"


def test_run_killed_before_its_last_record_is_finished(pretrain_options, trained_run):
    run = TrainingRun.load(trained_run)
    dataclasses.replace(run, status="running", step=4, domain_tokens={}, checkpoints=[]).save()
    pretrain(pretrain_options(trained_run))
    found = TrainingRun.load(trained_run)
    assert found.cost.flops == run.cost.flops
    assert dataclasses.replace(found, cost=run.cost, provenance=run.provenance) == run


def test_tokens_at_urls_train_as_local_ones(
    pretrain_options, finished_run, corpus, object_store, tmp_path
):
    url = object_store.put(corpus.root, "corpus")
    prefixes = [f"{url}/{corpus.domains[name].train.prefix}" for name in DOMAINS]
    data = DataOptions(
        data_path=" ".join(f"1 {prefix}" for prefix in prefixes),
        split="1,0,0",
        tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json"),
        object_storage_cache_path=tmp_path / "cache",
        data_cache_path=tmp_path / "indices",
    )
    options = pretrain_options(tmp_path / "run", corpus=None, data=data)
    pretrain(options)
    found, expected = metrics(options.run_dir), metrics(finished_run)
    assert [r["loss"] for r in found.values()] == [r["loss"] for r in expected.values()]
    assert len(list((tmp_path / "indices").iterdir())) == len(DOMAINS)
    object_store.system.rm(f"{prefixes[0]}.bin")
    with pytest.raises(UserError, match="no such file"):
        pretrain(dataclasses.replace(options, run_dir=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_rejected_run_with_overwrite_deletes_nothing(
    pretrain_options, trained_run, corpus, tmp_path
):
    def rejected(problem, hook_factory=None, **changes):
        with pytest.raises(UserError, match=problem):
            pretrain(pretrain_options(trained_run, overwrite=True, **changes), hook_factory)
        assert contents(trained_run) == before

    before = contents(trained_run)
    rejected("multiple of 3", micro_batch_size=3)
    rejected("requires --permutation epoch", MixtureChanger)
    rejected("run.json is in .* --overwrite deletes", mixture=str(trained_run / "run.json"))
    changed = shutil.copytree(corpus.root, tmp_path / "corpus")
    tokens = changed / corpus.prefix("code", "valid").relative_to(corpus.root).with_suffix(".bin")
    tokens.write_bytes(b"\0" + tokens.read_bytes()[1:])
    rejected("has changed", corpus=changed, data=DataOptions(verify_corpus=True))


def test_first_validation_is_that_of_the_initial_weights(pretrain_options, finished_run, tmp_path):
    """Validation changes no loss. A run that starts again after it was killed logs it once."""
    validation = ValidationOptions(eval_interval=6, eval_first_step=True)
    options = pretrain_options(tmp_path / "run", validation=validation)
    pretrain(options)
    assert losses(finished_run).items() < losses(options.run_dir).items()
    first = metrics(options.run_dir)[0]["validation_loss"]
    assert list(first) == list(DOMAINS)
    assert all(abs(loss - math.log(VOCAB_SIZE)) < 0.3 for loss in first.values())
    shutil.rmtree(options.run_dir / FOLDER_NAME)
    pretrain(options)
    lines = [line["step"] for line in TrainingRun.load(options.run_dir).metrics()]
    assert lines == [0, 2, 3, 4, 6]
    tuned = pretrain_options(
        tmp_path / "tuned", validation=validation, model=None, pretrained_checkpoint=finished_run
    )
    pretrain(tuned)
    last = metrics(options.run_dir)[6]["validation_loss"]
    assert metrics(tuned.run_dir)[0]["validation_loss"] == pytest.approx(last, abs=1e-6)


def test_a_held_out_domain_is_measured_and_never_trained_on(
    pretrain_options, corpus, held_out_corpus, tmp_path
):
    root = Path(shutil.copytree(corpus.root, tmp_path / "without"))
    domains = {name: corpus.domains[name] for name in held_out_corpus.names}
    dataclasses.replace(corpus, root=root, domains=domains).save()
    runs = {}
    for name, folder in (("with", held_out_corpus.root), ("without", root)):
        runs[name] = tmp_path / name
        validation = ValidationOptions(eval_interval=3)
        pretrain(pretrain_options(runs[name], corpus=folder, validation=validation))
    assert losses(runs["with"]) == losses(runs["without"])
    one, other = (TrainingRun.load(run) for run in runs.values())
    assert one.domain_tokens == other.domain_tokens
    found, expected = (metrics(run)[6]["validation_loss"] for run in runs.values())
    assert [*found] == ["news", "code", "poems"]
    assert {name: found[name] for name in expected} == expected
    output, folder = tmp_path / "valid.json", held_out_corpus.root
    options = PerplexityOptions(
        corpus=folder, checkpoint=runs["with"], output=output, split="valid"
    )
    (result,) = evaluate_perplexities([options])
    assert found == pytest.approx({n: d.loss for n, d in result.domains.items()}, abs=1e-6)
    validations = one.cost.flops - training_flops(SHAPE, one.tokens, 32)
    assert validations == pytest.approx(2 * result.cost.flops)
    assert result.held_out == ["poems"]
    means = [math.exp(result.domains[name].loss) for name in ("news", "code")]
    assert result.mean_perplexity == pytest.approx(sum(means) / 2)
    assert validation_curve([one]) == pytest.approx(
        {
            step * TOKENS_PER_STEP: (loss["news"] + loss["code"]) / 2
            for step in (3, 6)
            if (loss := metrics(runs["with"])[step]["validation_loss"])
        }
    )


def test_a_mixture_with_a_held_out_domain_is_rejected(pretrain_options, held_out_corpus, tmp_path):
    mixture = tmp_path / "mixture.json"
    mixture.write_text('{"weights": {"news": 0.5, "poems": 0.5}}')
    changes = DataOptions(mixture_change=((f"2={mixture}",),))
    for more in ({"mixture": str(mixture)}, {"data": changes}):
        options = pretrain_options(tmp_path / "run", corpus=held_out_corpus.root, **more)
        with pytest.raises(UserError, match=r"'poems'.*held out"):
            pretrain(options)
    assert not (tmp_path / "run").exists()


def test_signal_ends_the_run_with_a_checkpoint(
    pretrain_options, finished_run, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGUSR1)})
        pretrain(pretrain_options(run_dir))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.step, run.stopped_by) == ("interrupted", 4, "SIGUSR1")
    assert run.checkpoints[-1] == "checkpoints/step-00000004"
    pretrain(pretrain_options(run_dir))
    run = TrainingRun.load(run_dir)
    assert (run.status, run.stopped_by) == ("finished", None)
    assert losses(run_dir) == losses(finished_run)


def test_signal_before_the_first_step_changes_nothing(
    pretrain_options, trained_run, tmp_path, monkeypatch
):
    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return find_progress(*arguments)

    monkeypatch.setattr(trainer, "find_progress", signalled)
    before = contents(trained_run)
    pretrain(pretrain_options(trained_run, overwrite=True))
    assert contents(trained_run) == before
    pretrain(pretrain_options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_deterministic_profile_and_dry_step_change_nothing(
    pretrain_options, finished_run, tmp_path
):
    profiling = ProfilingOptions(profile=True, profile_step_start=1, profile_step_end=2)
    run_dir = tmp_path / "run"
    settings = {"deterministic": True, "profiling": profiling, "dry_first_step": "on"}
    pretrain(pretrain_options(run_dir, **settings))
    assert losses(run_dir) == losses(finished_run)
    assert record_at(run_dir, 6).hash == record_at(finished_run, 6).hash
    assert (run_dir / "profile" / "steps-2-to-2.json").stat().st_size > 10_000


def test_each_step_synchronizes_once(pretrain_options, tmp_path, monkeypatch):
    """Synchronizations by the data loader, the guard and stop requests are counted, too."""
    waits, run_step = [], trainer.Trainer.run_step

    def counting(trainer):
        host = [trainer.sync._host]
        waits.append(device_reads(lambda: run_step(trainer), monkeypatch, on_host=host))

    monkeypatch.setattr(trainer.Trainer, "run_step", counting)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=True)
    guards = GuardOptions(spike_factor=6.0)
    pretrain(pretrain_options(tmp_path / "run", boundaries=boundaries, guards=guards))
    assert waits == [1] * 6


def test_run_resumes_only_with_its_own_hook(pretrain_options, tmp_path, monkeypatch):
    options = pretrain_options(tmp_path / "run", data=DataOptions(permutation="epoch"))
    before_steps(monkeypatch, {2: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
    pretrain(options, LossWeigher)
    for other in (None, MixtureChanger):
        with pytest.raises(UserError, match="LossWeigher"):
            pretrain(options, other)


def test_prefetch_follows_the_mixture_of_the_hook(pretrain_options, tmp_path, monkeypatch):
    """Prefetching changes no losses and no samples, even on resume before a mixture change."""
    data = DataOptions(permutation="epoch")
    plain, ahead = (
        pretrain_options(tmp_path / name, log_interval=1, data=data) for name in ("plain", "ahead")
    )
    pretrain(plain, MixtureChanger)
    chunks = []

    def read_ahead(batches, device, counts):  # prefetch as on a GPU
        chunks.append(counts)
        return contextlib.closing(prefetch(batches, device, counts))

    monkeypatch.setattr(trainer, "read_ahead", read_ahead)
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(ahead, MixtureChanger)
    pretrain(ahead, MixtureChanger)
    assert chunks == [[8, 4], [4]]  # a step has two micro-batches
    assert losses(plain.run_dir) == losses(ahead.run_dir)
    sampled, again = (
        [line["domain_tokens_sampled"] for line in metrics(options.run_dir).values()]
        for options in (plain, ahead)
    )
    assert sampled == again
    assert sampled[-1] != sampled[0]
