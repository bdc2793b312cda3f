from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    MixturePhase,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointWarning,
    find_checkpoint,
    step_folder,
)
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.checkpointing import CheckpointingOptions
from megatron_chameleon.options.data import DataOptions
from megatron_chameleon.options.parallel import TrainingParallelOptions
from megatron_chameleon.options.training import (
    DocumentBoundaryOptions,
    OptimizerOptions,
    PretrainOptions,
)
from megatron_chameleon.training import plan as plan_module
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.pretrain import pretrain, samples_of
from megatron_chameleon.training.resume import (
    FREE_OPTIONS,
    Progress,
    check_same_samples,
    resumed_schedule,
)
from megatron_chameleon.training.way_out import WayOut
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus
from tests.unit.training.progress import progress_of_run


@pytest.fixture
def progress_of(pretrain_options):
    """``progress_of(run_dir, **changes)``: where the run stands for one who asks for these."""

    def find(run_dir, **changes):
        return progress_of_run(pretrain_options(run_dir, **changes))

    return find


def steps_of(run_dir):
    return [record["step"] for record in read_metrics(run_dir / METRICS_NAME)]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_without_a_run_starts_one_and_loses_nothing(progress_of, tmp_path, overwrite):
    run_dir = tmp_path / "run"
    assert progress_of(run_dir, overwrite=overwrite) == Progress()
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    assert progress_of(run_dir, overwrite=overwrite).step == 0
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_a_run_goes_on_from_its_last_checkpoint(progress_of, trained_run):
    before = contents(trained_run)
    progress = progress_of(trained_run)
    assert progress.step == 6
    assert progress.run == TrainingRun.load(trained_run)
    assert progress.checkpoint.root == step_folder(trained_run, 6)
    assert contents(trained_run) == before


def test_what_was_logged_after_the_checkpoint_is_dropped(progress_of, trained_run):
    shutil.rmtree(step_folder(trained_run, 6))
    assert steps_of(trained_run) == [2, 3, 4, 6]
    assert progress_of(trained_run).step == 3
    assert steps_of(trained_run) == [2, 3]


def test_a_run_without_checkpoints_starts_again(progress_of, trained_run):
    shutil.rmtree(trained_run / "checkpoints")
    progress = progress_of(trained_run)
    assert progress.step == 0
    assert progress.run is not None
    assert steps_of(trained_run) == []


OTHER: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "--seed 1234, not 7"),
    ({"train_iters": 8}, "--train-iters 6, not 8"),
    ({"global_batch_size": 4}, "--global-batch-size 8, not 4"),
    ({"seq_length": 16}, "--seq-length 32, not 16"),
    ({"model_size": "tiny"}, "--model-size nano, not tiny"),
    ({"bf16": True}, "--bf16 False, not True"),
    ({"data": DataOptions(permutation="epoch")}, "--permutation megatron, not epoch"),
    (
        {"boundaries": DocumentBoundaryOptions(eod_mask_loss=True)},
        "--eod-mask-loss False, not True",
    ),
    ({"optimizer": OptimizerOptions(lr=2e-2, lr_warmup_iters=2)}, "--lr 0.01, not 0.02"),
    ({"optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=3)}, "--lr-warmup-iters 2, not 3"),
]


@pytest.mark.parametrize(("changes", "told"), OTHER)
def test_a_run_of_other_options_is_refused_by_the_flag(progress_of, trained_run, changes, told):
    before = contents(trained_run)
    with pytest.raises(UserError) as refused:
        progress_of(trained_run, **changes)
    assert str(refused.value) == (
        f"{trained_run} holds a run with {told}; "
        "choose another --run-dir, or give --overwrite to start anew"
    )
    assert contents(trained_run) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 2},
        {"log_interval": 1},
        {"save_interval": 1},
        {"checkpointing": CheckpointingOptions(async_save=True, keep_last_checkpoints=0)},
        {"data": DataOptions(verify_corpus=True, data_cache_path=Path("cache"))},
        {"parallel": TrainingParallelOptions(tensor_model_parallel_size=2)},
    ],
)
def test_what_changes_no_number_may_be_another(progress_of, trained_run, changes):
    assert progress_of(trained_run, **changes).step == 6


def test_every_option_is_either_free_or_tried_above():
    tried = {name for changes, _ in OTHER for name in changes}
    data = {field.name for field in dataclasses.fields(DataOptions)}
    free = set(FREE_OPTIONS)
    assert tried | (free - data) == {field.name for field in dataclasses.fields(PretrainOptions)}
    assert data - free == {"permutation"}


def test_a_corpus_may_have_moved_but_not_changed(progress_of, trained_run, corpus, tmp_path):
    moved = Path(shutil.copytree(corpus.root, tmp_path / "moved"))
    assert progress_of(trained_run, corpus=moved).step == 6
    changed = write_small_corpus(tmp_path / "changed", seed=1)
    with pytest.raises(UserError, match="holds a run with another corpus; choose another"):
        progress_of(trained_run, corpus=changed.root)


def test_a_mixture_is_the_same_by_its_weights(progress_of, trained_run, tmp_path):
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(json.dumps({"weights": dict.fromkeys(DOMAINS, 1 / 3)}))
    other.write_text(json.dumps({"weights": dict(zip(DOMAINS, [0.2, 0.3, 0.5], strict=True))}))
    assert progress_of(trained_run, mixture=str(same)).step == 6
    with pytest.raises(UserError, match="holds a run with another mixture"):
        progress_of(trained_run, mixture=str(other))


@pytest.fixture(scope="module")
def changed_run(pretrain_options, tmp_path_factory):
    """A run drawn uniformly up to step 3, by poems alone from there; checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("changed")
    poems = {"news": 0.0, "code": 0.0, "poems": 1.0}
    (folder / "poems.json").write_text(json.dumps({"weights": poems}))
    pretrain(pretrain_options(folder / "run", data=changing(f"3={folder}/poems.json")))
    return folder


def changing(*changes):
    return DataOptions(mixture_change=(changes,) if changes else (), permutation="epoch")


def test_a_checkpoint_says_where_each_domain_stands(changed_run):
    first, last = (CheckpointRecord.load(step_folder(changed_run / "run", s)) for s in (3, 6))
    assert first.domain_samples == dict.fromkeys(DOMAINS, 8)
    assert [phase.first_sample for phase in first.mixture_phases] == [0]
    assert last.domain_samples == {"news": 8, "code": 8, "poems": 8 + 24}
    assert last.mixture_phases[1] == MixturePhase(24, {"news": 0.0, "code": 0.0, "poems": 1.0})
    assert last.domain_tokens == {name: n * 32 for name, n in last.domain_samples.items()}


def test_the_run_says_what_it_was_drawn_by(changed_run):
    run = TrainingRun.load(changed_run / "run")
    last = CheckpointRecord.load(step_folder(changed_run / "run", 6))
    assert run.mixture_phases == last.mixture_phases
    assert [phase.first_sample for phase in run.mixture_phases] == [0, 24]


def test_a_change_at_the_very_step_of_the_checkpoint_lies_ahead(changed_run, pretrain_options):
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    assert [phase.first_sample for phase in checkpoint.mixture_phases] == [0]
    uniform = (1 / 3,) * 3
    for changes, weights in {
        (f"3={changed_run}/poems.json",): [uniform, (0.0, 0.0, 1.0)],
        ("3=uniform",): [uniform, uniform],
        (): [uniform],
    }.items():
        plan = plan_training(pretrain_options(changed_run / "run", data=changing(*changes)))
        schedule = resumed_schedule(plan, checkpoint)
        assert [phase.first_sample for phase in schedule.phases] == [0, 24][: len(weights)]
        assert [phase.weights for phase in schedule.phases] == weights


def test_a_run_resumed_at_the_step_of_a_change_makes_it(changed_run, pretrain_options, tmp_path):
    run_dir = Path(shutil.copytree(changed_run / "run", tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    pretrain(pretrain_options(run_dir, data=changing(f"3={changed_run}/poems.json")))
    straight, resumed = (
        CheckpointRecord.load(step_folder(run, 6)) for run in (changed_run / "run", run_dir)
    )
    assert resumed.domain_samples == straight.domain_samples
    assert resumed.mixture_phases == straight.mixture_phases
    assert losses(run_dir) == losses(changed_run / "run")


def losses(run_dir):
    return [(record["step"], record["loss"]) for record in read_metrics(run_dir / METRICS_NAME)]


def test_the_samples_of_a_checkpoints_weights_are_those_of_the_run(changed_run, pretrain_options):
    first, again = (
        plan_training(pretrain_options(changed_run / "run", data=data))
        for data in (changing(f"3={changed_run}/poems.json"), changing())
    )
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 6))
    whole = samples_of(first, first.schedule).batch(range(48))
    rebuilt = samples_of(again, resumed_schedule(again, checkpoint)).batch(range(48))
    assert all(torch.equal(rebuilt[key], value) for key, value in whole.items())
    assert not torch.equal(
        samples_of(again, again.schedule).batch(range(48))["tokens"], whole["tokens"]
    )


def test_repeats_are_told_of_the_weights_that_the_run_goes_on_by(
    changed_run, pretrain_options, tmp_path, monkeypatch
):
    """Poems alone from step 2 on, which the second command does not say again."""
    run_dir, poems = tmp_path / "run", changed_run / "poems.json"
    pretrain(pretrain_options(run_dir, data=changing(f"2={poems}")))
    whole = losses(run_dir)
    shutil.rmtree(step_folder(run_dir, 6))
    plan = plan_training(pretrain_options(run_dir, data=changing()))
    tokens = plan.data.tokens["poems"]
    drawn, planned = (16 / 3 + 32) * 32 / tokens, 16 * 32 / tokens
    monkeypatch.setattr(plan_module, "MANY_EPOCHS", (drawn + planned) / 2)
    with pytest.warns(MixtureWarning, match="'poems' will be repeated") as warned:
        pretrain(pretrain_options(run_dir, data=changing()))
    assert len([w for w in warned if issubclass(w.category, MixtureWarning)]) == 1
    assert losses(run_dir) == whole


def test_a_run_that_would_read_other_samples_does_not_go_on(trained_run, pretrain_options):
    shutil.rmtree(step_folder(trained_run, 6))
    record = step_folder(trained_run, 3) / "checkpoint.json"
    body = json.loads(record.read_text())
    body["domain_samples"]["news"] += 1
    record.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"9 samples of 'news' were drawn, .* ask for 8"):
        pretrain(pretrain_options(trained_run))


def test_a_data_path_may_have_moved_but_not_changed(pretrain_options, corpus, tmp_path):
    poems = tmp_path / "poems.json"
    poems.write_text(json.dumps({"weights": {"poems": 0.9, "news": 0.1, "code": 0.0}}))
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json")

    def options(folder, run="run"):
        data = DataOptions(
            data_path=" ".join(f"1 {folder / name}" for name in DOMAINS),
            split="1",
            tokenizer_model=tokenizer,
            permutation="epoch",
            mixture_change=((f"2={poems}",),),
        )
        return pretrain_options(tmp_path / run, corpus=None, data=data)

    here = corpus.prefix("news", "train").parent
    pretrain(options(here))
    whole = losses(tmp_path / "run")
    shutil.rmtree(step_folder(tmp_path / "run", 6))
    there = Path(shutil.copytree(here, tmp_path / "elsewhere"))
    pretrain(options(there))
    assert losses(tmp_path / "run") == whole

    flipped = there / "code.bin"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\1")
    told = "holds a run with another content of --data-path, --split or tokenizer; choose"
    with pytest.raises(UserError, match=told):
        pretrain(options(there))
    shutil.copy(here / "code.bin", flipped)
    for suffix in (".bin", ".idx"):
        (there / f"code{suffix}").rename(there / f"programs{suffix}")
    renamed = dataclasses.replace(options(there).data, mixture_change=())
    given = str(renamed.data_path).replace("elsewhere/code", "elsewhere/programs")
    with pytest.raises(UserError, match="by other names: news, code, poems, not news, programs"):
        pretrain(
            dataclasses.replace(options(there), data=dataclasses.replace(renamed, data_path=given))
        )


def test_changes_that_lie_ahead_may_be_others_than_were_planned(
    changed_run, pretrain_options, tmp_path
):
    run_dir = Path(shutil.copytree(changed_run / "run", tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    changes = (f"4={changed_run}/poems.json", "5=uniform")
    pretrain(pretrain_options(run_dir, data=changing(*changes)))
    checkpoint = CheckpointRecord.load(step_folder(run_dir, 6))
    assert [phase.first_sample for phase in checkpoint.mixture_phases] == [0, 32, 40]
    assert checkpoint.domain_samples == {"news": 14, "code": 14, "poems": 20}
    # The same run in one go: what comes after the checkpoint does not hang on the interruption.
    whole = tmp_path / "whole"
    pretrain(pretrain_options(whole, data=changing(*changes)))
    assert CheckpointRecord.load(step_folder(whole, 6)).domain_samples == checkpoint.domain_samples
    assert losses(run_dir) == losses(whole)


def test_a_change_that_the_run_has_passed_without_making_it_is_refused(
    changed_run, pretrain_options
):
    plan = plan_training(pretrain_options(changed_run / "run", data=changing("2=uniform")))
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    with pytest.raises(UserError, match=r"--mixture-change 2=.* at step 3 .* from 3 on"):
        resumed_schedule(plan, checkpoint)


def test_weights_that_the_options_do_not_say_come_from_the_checkpoint(
    changed_run, pretrain_options
):
    plan = plan_training(pretrain_options(changed_run / "run", data=changing()))
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 6))
    schedule = resumed_schedule(plan, checkpoint)
    assert [phase.first_sample for phase in schedule.phases] == [0, 24]
    assert schedule.weights_at(24) == (0.0, 0.0, 1.0)


def test_a_checkpoint_at_which_the_domains_stand_elsewhere_is_refused(
    changed_run, pretrain_options
):
    plan = plan_training(pretrain_options(changed_run / "run", data=changing()))
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    samples = samples_of(plan, plan.schedule)
    check_same_samples(samples, checkpoint)
    other = dataclasses.replace(checkpoint, domain_samples={"news": 9, "code": 8, "poems": 7})
    with pytest.raises(
        UserError, match=r"9 samples of 'news' were drawn, .* ask for 8.*begin anew"
    ):
        check_same_samples(samples, other, WayOut(anew="begin anew"))


def test_overwrite_starts_anew_whatever_was_there(progress_of, trained_run):
    assert progress_of(trained_run, overwrite=True, seed=7) == Progress()
    assert list(trained_run.iterdir()) == []


def test_a_bad_option_deletes_nothing(progress_of, trained_run):
    before = contents(trained_run)
    with pytest.raises(UserError):
        progress_of(trained_run, overwrite=True, model_size="83m")
    assert contents(trained_run) == before


def largest_file(folder):
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip_a_bit, "has changed since it was written"),
        (truncate, "is missing or not of its size"),
        (Path.unlink, "is missing or not of its size"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    progress_of, trained_run, damage, told
):
    path = largest_file(step_folder(trained_run, 6))
    damage(path)
    with pytest.warns(CheckpointWarning) as warned:
        assert progress_of(trained_run).step == 3
    (line,) = (str(warning.message) for warning in warned)
    assert line.startswith(f"{path} {told}")
    assert "going on from step 3; kept as " in line
    assert "\n" not in line
    assert steps_of(trained_run) == [2, 3]
    assert find_checkpoint(trained_run) == step_folder(trained_run, 3)
    kept = step_folder(trained_run, 6).with_name("unused-step-00000006")
    assert kept.is_dir()
    assert not step_folder(trained_run, 6).exists()


def test_a_run_with_a_damaged_checkpoint_ends_as_if_it_had_never_been(
    pretrain_options, trained_run, finished_run
):
    flip_a_bit(largest_file(step_folder(trained_run, 6)))
    with pytest.warns(CheckpointWarning, match="going on from step 3"):
        pretrain(pretrain_options(trained_run))
    assert losses(trained_run) == losses(finished_run)
    again, whole = (CheckpointRecord.load(step_folder(r, 6)) for r in (trained_run, finished_run))
    assert again.hash == whole.hash


def test_a_run_of_which_no_checkpoint_is_whole_is_refused_and_left_as_it_is(
    progress_of, trained_run
):
    for step in (3, 6):
        flip_a_bit(largest_file(step_folder(trained_run, step)))
    before = contents(trained_run)
    with pytest.raises(UserError, match=r"step-00000006/.* has changed .*: no checkpoint of"):
        progress_of(trained_run)
    assert contents(trained_run) == before


def damage_all(run_dir):
    for step in (3, 6):
        flip_a_bit(largest_file(step_folder(run_dir, step)))


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (damage_all, {}, "restore one from a copy, or begin anew"),
        (lambda run_dir: (run_dir / "run.json").unlink(), {}, "what they belong to; go elsewhere"),
        (lambda _run_dir: None, {"seed": 7}, "not 7; go elsewhere, or begin anew"),
    ],
)
def test_what_helps_is_told_in_the_words_of_the_command(
    pretrain_options, trained_run, spoil, changes, said
):
    spoil(trained_run)
    options = pretrain_options(trained_run, **changes)
    with pytest.raises(UserError) as refused:
        pretrain(options, way_out=WayOut("go elsewhere", "begin anew"))
    assert str(refused.value).endswith(said)


def test_a_run_goes_back_to_the_checkpoint_that_latest_names(
    progress_of, pretrain_options, trained_run, finished_run
):
    (trained_run / "checkpoints" / "latest").write_text("step-00000003\n")
    assert progress_of(trained_run).step == 3
    pretrain(pretrain_options(trained_run))
    names = sorted(path.name for path in (trained_run / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000006", "unused-step-00000006"]
    assert losses(trained_run) == losses(finished_run)


def test_what_killed_saves_have_left_is_removed(progress_of, trained_run):
    left = trained_run / "checkpoints" / ".step-00000009.1a2b3c4d.tmp"
    left.mkdir()
    progress_of(trained_run)
    assert not left.exists()


def test_a_checkpoint_that_a_killed_save_had_set_aside_is_gone_on_from(progress_of, trained_run):
    newest = step_folder(trained_run, 6)
    newest.rename(newest.with_name(f".{newest.name}.replaced"))
    newest.with_name(f".{newest.name}.1a2b3c4d.tmp").mkdir()
    assert progress_of(trained_run).step == 6
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["latest", "step-00000003", "step-00000006"]


def test_the_optimizers_form_cannot_change(progress_of, trained_run):
    sharded = TrainingParallelOptions(use_distributed_optimizer=True)
    with pytest.raises(UserError, match=r"without --use-distributed-optimizer .*; leave out"):
        progress_of(trained_run, parallel=sharded)


def test_a_damaged_run_file_is_told(progress_of, trained_run):
    (trained_run / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json:1: not JSON"):
        progress_of(trained_run)
