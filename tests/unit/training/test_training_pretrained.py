"""A run that starts from the weights of another one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import write_small_corpus
from tests.unit.training.progress import progress_of_run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with distributed(ParallelOptions(), seed=0) as layout:
        state = open_reader(CheckpointRecord.load(folder), layout).model.state_dict()
        return {name: value.clone() for name, value in state.items() if value is not None}


def losses_of(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run_dir / METRICS_NAME)]


@pytest.fixture(scope="module")
def tuned(pretrain_options, finished_run, tmp_path_factory) -> Path:
    """A run of two steps from the weights of ``finished_run``, in shorter samples."""
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    pretrain(
        pretrain_options(
            run_dir,
            pretrained_checkpoint=finished_run,
            seed=77,
            train_iters=2,
            seq_length=16,
            log_interval=1,
            save_interval=1,
            optimizer=OptimizerOptions(lr=1e-9, min_lr=0.0, lr_warmup_iters=1, weight_decay=0.0),
        )
    )
    return run_dir


def test_it_starts_from_those_weights_and_not_from_its_seed(finished_run, tuned):
    before = weights_of(step_folder(finished_run, 6))
    after = weights_of(step_folder(tuned, 1))  # the rate was at most 1e-9
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-7)


def test_its_first_loss_is_that_of_a_trained_model(finished_run, tuned):
    assert losses_of(tuned)[0] < 0.9 * losses_of(finished_run)[0]


def test_schedule_steps_and_samples_start_anew(tuned):
    record = CheckpointRecord.load(step_folder(tuned, 1))
    assert (record.step, record.samples) == (1, 8)
    rates = [record["lr"] for record in read_metrics(tuned / METRICS_NAME)]
    assert rates[0] == pytest.approx(1e-9)


def test_the_table_of_positions_stays_as_long_as_it_was(tuned):
    shape = shape_of(CheckpointRecord.load(step_folder(tuned, 2)))
    assert shape.max_sequence_length == 32
    assert TrainingRun.load(tuned).tokens == 2 * 8 * 16


def test_its_record_names_the_weights(finished_run, tuned):
    inputs = TrainingRun.load(tuned).provenance.inputs
    expected = CheckpointRecord.load(step_folder(finished_run, 6)).hash
    assert inputs["pretrained checkpoint"] == expected


def test_bf16_takes_its_main_weights_from_them_too(pretrain_options, finished_run, tmp_path):
    run_dir = tmp_path / "run"
    pretrain(
        pretrain_options(
            run_dir,
            pretrained_checkpoint=finished_run,
            train_iters=3,
            log_interval=1,
            bf16=True,
            optimizer=OptimizerOptions(lr=1e-6, min_lr=0.0, lr_warmup_iters=1),
        )
    )
    assert losses_of(run_dir)[2] < 0.93 * losses_of(finished_run)[0]


def test_it_goes_on_from_its_own_checkpoint(pretrain_options, finished_run, tmp_path, capsys):
    options = pretrain_options(tmp_path / "run", pretrained_checkpoint=finished_run)
    pretrain(options)
    whole = losses_of(options.run_dir)
    assert "initial weights: " in capsys.readouterr().out
    shutil.rmtree(step_folder(options.run_dir, 6))
    pretrain(options)
    said = capsys.readouterr().out
    assert "resuming at step 3" in said
    assert "initial weights: " not in said
    assert losses_of(options.run_dir) == whole


@pytest.fixture
def begun(pretrain_options, tuned, finished_run):
    """``begun(**changes)``: the options that go on with a copy of ``tuned``."""

    def options(run_dir, pretrained=finished_run):
        return pretrain_options(
            run_dir,
            pretrained_checkpoint=pretrained,
            seed=77,
            train_iters=2,
            seq_length=16,
            optimizer=OptimizerOptions(lr=1e-9, min_lr=0.0, lr_warmup_iters=1, weight_decay=0.0),
        )

    return options


def test_the_weights_may_have_moved(begun, tuned, finished_run, tmp_path):
    moved = shutil.copytree(finished_run, tmp_path / "moved")
    assert progress_of_run(begun(tuned, pretrained=moved)).step == 2


@pytest.mark.parametrize("step", [3, None])
def test_a_run_that_started_from_others_is_refused(begun, tuned, finished_run, step):
    other = None if step is None else step_folder(finished_run, step)
    with pytest.raises(UserError, match=r"holds a run with pretrained checkpoint"):
        progress_of_run(begun(tuned, pretrained=other))


def test_a_run_that_started_from_random_weights_is_refused(
    pretrain_options, trained_run, finished_run
):
    options = pretrain_options(trained_run, pretrained_checkpoint=finished_run)
    with pytest.raises(UserError, match=r"holds a run with pretrained checkpoint"):
        progress_of_run(options)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"seq_length": 33},
            r"--seq-length 33: .*step-00000006 .* has 32 positions",
        ),
        (
            {"model_size": "tiny"},
            r"step-00000006 has hidden_size 64, --model-size tiny has 128",
        ),
        (
            {"pretrained_checkpoint": Path("nowhere")},
            r"--pretrained-checkpoint nowhere: neither a checkpoint nor a run with one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(pretrain_options, finished_run, tmp_path, changes, told):
    options = pretrain_options(tmp_path / "run", pretrained_checkpoint=finished_run)
    with pytest.raises(UserError, match=told):
        plan_training(dataclasses.replace(options, **changes))
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(pretrain_options, finished_run, tmp_path):
    other = write_small_corpus(tmp_path / "corpus", tokenizer_hash="6" * 64)
    options = pretrain_options(
        tmp_path / "run", corpus=other.root, pretrained_checkpoint=finished_run
    )
    with pytest.raises(UserError, match=r"step-00000006 was trained with another tokenizer than"):
        plan_training(options)
