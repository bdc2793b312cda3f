"""Test which checkpoint is resumed, which options may change, and which samples follow."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, MixturePhase, SampledTokens, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointWarning, step_folder
from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions, TraceOptions
from megatron_chameleon.blend.trace import trace_samples
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.checkpointing import check_same_samples, resumed_schedule
from megatron_chameleon.training.options import CheckpointingOptions, OptimizerOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.training.runs import contents, losses, metrics, progress_of_run, record_at


@pytest.fixture
def progress_of(pretrain_options):
    """``progress_of(run_dir, **changes)``: progress of a run resumed with other options."""

    def find(run_dir, **changes):
        return progress_of_run(pretrain_options(run_dir, **changes))

    return find


SHARDED = TrainingParallelOptions(use_distributed_optimizer=True)
MASKED = DocumentBoundaryOptions(eod_mask_loss=True)
OTHER: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "--seed 1234, not 7"),
    ({"target_tokens": 9999}, "--target-tokens None, not 9999"),
    ({"model": "tiny"}, "--hidden-size 64, not 128"),
    ({"architecture": ArchitectureOptions(qk_layernorm=True)}, "--qk-layernorm False, not True"),
    ({"data": DataOptions(permutation="epoch")}, "--permutation megatron, not epoch"),
    ({"attention_dropout": 0.1}, "--attention-dropout 0.0, not 0.1"),
    ({"boundaries": MASKED}, "--eod-mask-loss False, not True"),
    ({"optimizer": OptimizerOptions(lr=2e-2, lr_warmup_iters=2)}, "--lr 0.01, not 0.02"),
    ({"parallel": SHARDED}, "--use-distributed-optimizer"),
]
FREE: list[dict[str, Any]] = [
    {"micro_batch_size": 2, "log_interval": 1, "save_interval": 1},
    {"checkpointing": CheckpointingOptions(async_save=True, keep_last_checkpoints=0)},
    {"data": DataOptions(verify_corpus=True, data_cache_path=Path("cache"))},
    {"data": DataOptions(object_storage_cache_path=Path("cache"))},
    {"parallel": TrainingParallelOptions(tensor_model_parallel_size=2)},
    {"architecture": ArchitectureOptions(num_layers=4, position_embedding_type="learned_absolute")},
]


def test_only_options_that_do_not_affect_results_may_change(progress_of, trained_run):
    before = contents(trained_run)
    for changes, flag in OTHER:
        with pytest.raises(UserError, match=flag):
            progress_of(trained_run, **changes)
    assert contents(trained_run) == before
    for changes in FREE:
        assert progress_of(trained_run, **changes).step == 6


def test_corpus_and_mixture_are_compared_by_content(progress_of, trained_run, corpus, tmp_path):
    moved = Path(shutil.copytree(corpus.root, tmp_path / "moved"))
    assert progress_of(trained_run, corpus=moved).step == 6
    changed = write_small_corpus(tmp_path / "changed", seed=1)
    with pytest.raises(UserError, match="corpus"):
        progress_of(trained_run, corpus=changed.root)
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(json.dumps({"weights": dict.fromkeys(DOMAINS, 1 / 3)}))
    other.write_text(json.dumps({"weights": dict(zip(DOMAINS, [0.2, 0.3, 0.5], strict=True))}))
    assert progress_of(trained_run, mixture=str(same)).step == 6
    with pytest.raises(UserError, match="holds a run with another mixture"):
        progress_of(trained_run, mixture=str(other))


def largest_file(folder):
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, Path.unlink])
def test_damaged_checkpoint_is_skipped_for_the_previous_one(progress_of, trained_run, damage):
    path = largest_file(step_folder(trained_run, 6))
    damage(path)
    with pytest.warns(CheckpointWarning) as warned:
        assert progress_of(trained_run).step == 3
    (message,) = (str(w.message) for w in warned if w.category is CheckpointWarning)
    assert str(path) in message
    assert list(metrics(trained_run)) == [2, 3]
    assert step_folder(trained_run, 6).with_name("unused-step-00000006").is_dir()


def test_run_without_an_undamaged_checkpoint_is_unchanged(progress_of, trained_run):
    for step in (3, 6):
        flip_a_bit(largest_file(step_folder(trained_run, step)))
    before = contents(trained_run)
    with pytest.raises(UserError, match="step-00000006/"):
        progress_of(trained_run)
    assert contents(trained_run) == before


@pytest.fixture(scope="module")
def changed_run(pretrain_options, tmp_path_factory):
    """A run that samples uniformly up to step 3, then only poems; checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("changed")
    poems = {"news": 0.0, "code": 0.0, "poems": 1.0}
    (folder / "poems.json").write_text(json.dumps({"weights": poems}))
    data = changing(f"3={folder}/poems.json")
    pretrain(pretrain_options(folder / "run", data=data, boundaries=MASKED))
    return folder


def changing(*changes):
    return DataOptions(mixture_change=(changes,) if changes else (), permutation="epoch")


def test_mixture_change_is_recorded_exactly(changed_run, corpus):
    records = metrics(changed_run / "run").values()
    # Masked tokens are counted as sampled tokens.
    assert [
        {n: d["actual"] // 32 for n, d in record["sampled_tokens"].items()} for record in records
    ] == [
        {"news": 5, "code": 5, "poems": 6},
        {"news": 8, "code": 8, "poems": 8},
        {"news": 8, "code": 8, "poems": 16},
        {"news": 8, "code": 8, "poems": 32},
    ]
    run = TrainingRun.load(changed_run / "run")
    assert run.mixture == {"news": 0.0, "code": 0.0, "poems": 1.0}
    tokens = corpus.domains["poems"].train.tokens
    assert run.domain_tokens["poems"] == SampledTokens(1.0, 1024.0, 1024, 1024 / tokens)
    first, last = (record_at(changed_run / "run", step) for step in (3, 6))
    assert first.domain_samples == dict.fromkeys(DOMAINS, 8)
    # The checkpoint of step 3 precedes the mixture change.
    assert [phase.first_sample for phase in first.mixture_phases] == [0]
    assert last.domain_samples == {"news": 8, "code": 8, "poems": 8 + 24}
    assert last.mixture_phases[1] == MixturePhase(24, {"news": 0.0, "code": 0.0, "poems": 1.0})
    assert last.domain_tokens == {name: n * 32 for name, n in last.domain_samples.items()}


def test_mixture_changes_ahead_of_the_checkpoint_may_differ(
    changed_run, pretrain_options, tmp_path
):
    run_dir = Path(shutil.copytree(changed_run / "run", tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    data = changing(f"4={changed_run}/poems.json", "5=uniform")
    pretrain(pretrain_options(run_dir, data=data, boundaries=MASKED))
    checkpoint = record_at(run_dir, 6)
    assert [phase.first_sample for phase in checkpoint.mixture_phases] == [0, 32, 40]
    assert checkpoint.domain_samples == {"news": 13, "code": 14, "poems": 21}
    whole = tmp_path / "whole"
    pretrain(pretrain_options(whole, data=data, boundaries=MASKED))
    assert record_at(whole, 6).domain_samples == checkpoint.domain_samples
    assert losses(run_dir) == losses(whole)


def test_run_resumes_within_a_ramp(changed_run, pretrain_options, tmp_path):
    data = changing(f"2..5={changed_run}/poems.json")
    whole = tmp_path / "whole"
    pretrain(pretrain_options(whole, data=data))
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    checkpoint = record_at(run_dir, 3)
    assert checkpoint.mixture_phases[1].ramp_samples == 24
    overlapping = plan_training(pretrain_options(run_dir, data=changing("4=uniform")))
    with pytest.raises(UserError, match=r"step 4 .*2\.\.5"):
        resumed_schedule(overlapping, checkpoint)
    # A ramp that has begun ends as planned, even without its flag.
    pretrain(pretrain_options(run_dir, data=changing()))
    assert losses(run_dir) == losses(whole)
    assert record_at(run_dir, 6).domain_samples == record_at(whole, 6).domain_samples
    assert record_at(run_dir, 6).domain_samples["poems"] == pytest.approx(5 + 16 + 8, abs=1)


def test_a_run_with_limited_weights_resumes_with_the_same_limits(
    pretrain_options, corpus, tmp_path
):
    mixture = tmp_path / "m.json"
    limits = {"max_repetition": {"news": 0.1}}
    mixture.write_text(json.dumps({"weights": {"news": 0.8, "code": 0.1, "poems": 0.1}, **limits}))
    run = {"mixture": str(mixture), "max_repetition_action": "redistribute"}
    whole = tmp_path / "whole"
    pretrain(pretrain_options(whole, **run))
    recorded, tokens = TrainingRun.load(whole), corpus.train_tokens["news"]
    assert recorded.limited
    assert recorded.limited == pytest.approx({"news": 0.8 * 6 * 256 / tokens})
    assert recorded.domain_tokens["news"].epochs <= 0.1
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    for other in ({"max_repetition_action": "warn"}, {}):
        if not other:
            mixture.write_text(mixture.read_text().replace("0.1}}", "0.05}}"))
        with pytest.raises(UserError, match="--max-repetition-action"):
            pretrain(pretrain_options(run_dir, **{**run, **other}))
    mixture.write_text(mixture.read_text().replace("0.05}}", "0.1}}"))
    pretrain(pretrain_options(run_dir, **run))
    assert losses(run_dir) == losses(whole)
    output = tmp_path / "counts.jsonl"
    trace_samples(TraceOptions(run=run_dir, counts=True, output=output))
    counted = [json.loads(line) for line in output.read_text().splitlines()]
    news = sum(line["tokens"] for line in counted if line["domain"] == "news")
    assert news == recorded.domain_tokens["news"].actual


def test_samples_that_contradict_the_checkpoint_are_an_error(changed_run, pretrain_options):
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    missed = plan_training(pretrain_options(changed_run / "run", data=changing("2=uniform")))
    with pytest.raises(UserError, match="--mixture-change 2="):
        resumed_schedule(missed, checkpoint)
    plan = plan_training(pretrain_options(changed_run / "run", data=changing()))
    samples = plan.samples(plan.schedule)
    check_same_samples(samples, checkpoint)
    with pytest.raises(UserError, match="version 1"):
        check_same_samples(samples, dataclasses.replace(checkpoint, order_version=1))
    other = dataclasses.replace(checkpoint, domain_samples={"news": 9, "code": 8, "poems": 7})
    with pytest.raises(UserError, match="'news'"):
        check_same_samples(samples, other)
