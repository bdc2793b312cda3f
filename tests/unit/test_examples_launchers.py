"""What the launchers of examples/ start with which arguments, and what they refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megatron_chameleon.evaluation.options import PerplexityToolOptions
from megatron_chameleon.methods.chameleon import ChameleonOptions
from tests.unit.launched import (
    EXAMPLES,
    LAUNCHERS,
    RECORDER,
    SWEEPING,
    WEIGHING,
    Launcher,
    write_everything,
)

# launcher -> size, steps and batch of what it reproduces, and the size's rates (paper).
PROXY_RATES, BASE_RATES = (5e-4, 1e-4), (1.5e-4, 5e-5)
PAPER: dict[str, tuple[str, int, int, tuple[float, float]]] = {
    "pretrain_60m_proxy": ("60m", 2000, 128, PROXY_RATES),
    "pretrain_82m_proxy": ("82m", 2000, 128, PROXY_RATES),
    "pretrain_124m_proxy": ("124m", 2000, 128, PROXY_RATES),
    "pretrain_210m_proxy": ("210m", 2000, 128, PROXY_RATES),
    "pretrain_684m": ("684m", 10000, 128, BASE_RATES),
    "pretrain_1_2b": ("1.2b", 10000, 128, BASE_RATES),
    "pretrain_684m_pile": ("684m", 10000, 512, BASE_RATES),
    "finetune_wiki40b": ("684m", 10000, 128, BASE_RATES),
    "finetune_stack": ("684m", 10000, 128, BASE_RATES),
}
PRETRAINING = [name for name in LAUNCHERS if name.startswith("pretrain")]
NOT_LAUNCHERS = {"compare_methods", "compare_mixtures", "hyperparameters", "jobs", "launch"}
NOT_LAUNCHERS |= {"quickstart", "evaluate_downstream"}


@pytest.fixture
def launch(tmp_path):
    return Launcher(tmp_path)


@pytest.fixture
def everything(tmp_path):
    """The folder that launchers are started in, with all that they look for by default."""
    write_everything(tmp_path)
    return tmp_path


def test_there_is_a_launcher_for_every_experiment_and_no_other():
    there = {path.stem for path in EXAMPLES.glob("*.sh")}
    assert there == {*PAPER, *WEIGHING, *SWEEPING, *NOT_LAUNCHERS}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_trains_what_it_reproduces(launch, everything, name):
    launched = launch(name)
    assert launched.status == 0, launched.errors
    size, steps, batch, rates = PAPER[name]
    assert launched.training()
    for options in launched.training():
        assert (options.model_size, options.train_iters) == (size, steps)
        assert (options.global_batch_size, options.seq_length) == (batch, 1024)
        assert (options.optimizer.lr, options.optimizer.min_lr) == rates
        assert options.bf16


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_is_tried_out_is_tiny_and_on_two_ranks(launch, everything, name):
    launched = launch(name, SIZE="tiny")
    assert launched.status == 0, launched.errors
    assert launched.training()
    for call in launched.calls:
        assert call.ranks is None or (call.ranks.nproc_per_node, call.ranks.nnodes) == ("2", "1:1")
    for options in launched.training():
        assert (options.model_size, options.bf16) == ("tiny", False)
        assert options.train_iters * options.global_batch_size * options.seq_length < 10_000
        assert options.run_dir.parts[:3] == ("runs", "tiny", name)


@pytest.mark.parametrize("name", PRETRAINING)
def test_a_pretraining_launcher_is_one_torchrun_line(launch, everything, name):
    (call,) = launch(name).calls
    assert call.program == "torchrun"
    assert (EXAMPLES / f"{name}.sh").read_text().rstrip().splitlines()[-2].startswith("exec torchr")


@pytest.mark.parametrize("name", PRETRAINING)
def test_the_environment_chooses(launch, everything, name, tmp_path):
    mixture = tmp_path / "weights.json"
    mixture.touch()
    choices = {"TP": "2", "PP": "3", "NPROC": "6", "SEED": "7", "RUN": "my run"}
    choices |= {"CORPUS": "runs/stack/1-corpus", "MIXTURE": str(mixture), "SIZE": "210m"}
    (call,) = launch(name, **choices).calls
    options = call.options
    assert (options.parallel.tensor_model_parallel_size, call.ranks.nproc_per_node) == (2, "6")
    assert options.parallel.pipeline_model_parallel_size == 3
    assert (options.seed, options.corpus) == (7, Path("runs/stack/1-corpus"))
    assert (options.mixture, options.model_size) == (str(mixture), "210m")
    folder = "2-proxy/210m-seed7" if name.endswith("proxy") else "5-base/weights-seed7"
    assert options.run_dir == Path("my run") / folder


def test_a_mixture_goes_by_its_name_in_the_run_folder(launch, everything):
    (options,) = launch("pretrain_684m").training()
    assert options.mixture == "runs/slimpajama/4-mixture/chameleon-pretrain.json"
    assert options.run_dir == Path("runs/slimpajama/5-base/chameleon-pretrain-seed1")
    (options,) = launch("pretrain_684m", MIXTURE="uniform").training()
    assert (options.mixture, options.run_dir.name) == ("uniform", "uniform-seed1")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_flags_after_two_dashes_have_the_last_word(launch, everything, name):
    launched = launch(name, "--", "--train-iters", "7", "--lr-warmup-iters", "1", "--seed", "5")
    assert launched.status == 0, launched.errors
    for options in launched.training():
        assert (options.train_iters, options.optimizer.lr_warmup_iters, options.seed) == (7, 1, 5)


def test_several_nodes_meet_on_the_first(launch, everything):
    choices = {"NNODES": "4", "SLURM_NODEID": "2", "MASTER_ADDR": "node7", "NPROC": "8"}
    (call,) = launch("pretrain_1_2b", MIXTURE="uniform", **choices).calls
    assert (call.ranks.nnodes, call.ranks.node_rank, call.ranks.master_addr) == ("4", 2, "node7")
    assert (call.ranks.nproc_per_node, call.ranks.standalone) == ("8", False)
    refused = launch("pretrain_1_2b", NNODES="4")
    assert refused.status != 0
    assert "MASTER_ADDR: is the name of the first of NNODES nodes" in refused.errors


def test_fine_tuning_compares_three_mixtures_from_one_checkpoint(launch, everything):
    launched = launch("finetune_wiki40b")
    pretrained = Path("runs/pile/5-base/chameleon-pretrain-seed1")
    first, second = (c.options for c in launched.calls if isinstance(c.options, ChameleonOptions))
    assert (first.mode, second.mode) == ("finetune", "pretrain")
    assert first.checkpoint == second.checkpoint == pretrained
    assert first.store == second.store
    assert first.extraction.num_windows == 4096
    training = launched.training()
    assert [options.mixture for options in training] == [
        "uniform",
        str(first.output),
        str(second.output),
    ]
    assert {options.pretrained_checkpoint for options in training} == {pretrained}
    *_, evaluation, report = launched.calls
    assert isinstance(evaluation.options, PerplexityToolOptions)
    tested = evaluation.options.one_by_one()
    assert [o.checkpoint for o in tested] == [o.run_dir for o in training]
    assert [o.output.stem for o in tested] == [o.run_dir.name for o in training]
    assert (report.program, report.options.runs) == ("python", (Path("runs/wiki40b"),))


def test_the_comparison_is_of_the_runs_that_were_chosen(launch, everything):
    launched = launch("finetune_stack", MIXTURE="chameleon-finetune", SEED="3")
    (training,) = launched.training()
    (tested,) = launched.calls[-2].options.one_by_one()
    assert (
        tested.checkpoint == training.run_dir == Path("runs/stack/5-base/chameleon-finetune-seed3")
    )
    assert tested.output == Path("runs/stack/6-evaluation/chameleon-finetune-seed3.json")


def test_other_nodes_do_not_write_what_the_first_one_writes(launch, everything):
    launched = launch("finetune_stack", NNODES="2", NODE_RANK="1", MASTER_ADDR="first")
    assert launched.status == 0, launched.errors
    assert {call.program for call in launched.calls} == {"torchrun"}


def test_other_nodes_wait_for_the_weights_that_the_first_one_makes(launch, everything, tmp_path):
    (tmp_path / "runs/stack/4-mixture/chameleon-pretrain.json").unlink()
    choices = {"MIXTURE": "chameleon-pretrain", "NNODES": "2", "MASTER_ADDR": "first"}
    launched = launch("finetune_stack", NODE_RANK="1", **choices)
    assert launched.status == 0, launched.errors
    assert launch("finetune_stack", NODE_RANK="0", **choices).status == 2


def test_a_run_leaves_in_time(launch, everything):
    limit = str(int(time.time()) + 90 * 60)
    for options in launch("finetune_stack", STOP_AT=limit).training():
        assert 89.5 < options.stopping.exit_duration_in_mins <= 90
    late = launch("finetune_stack", STOP_AT="1000000000")
    assert late.status == 0
    assert late.training() == []
    assert "the time is up; the same command goes on from here" in late.said


@pytest.mark.parametrize("name", [*WEIGHING, "evaluate_downstream", "finetune_stack"])
def test_what_has_no_flag_for_it_is_ended_in_time(launch, everything, name):
    """What it has written by then is there, and the same command goes on from it."""
    (everything / "runs/slimpajama/5-base/uniform-seed1").mkdir(parents=True)
    torchrun = launch.programs / "torchrun"
    torchrun.write_text(f"{RECORDER}exec sleep 100\n")
    in_the_middle = launch(name, STOP_AT=str(int(time.time()) + 4))
    assert (in_the_middle.status, len(in_the_middle.calls)) == (0, 1), in_the_middle.errors
    assert in_the_middle.said.endswith("the time is up; the same command goes on from here\n")
    late = launch(name, STOP_AT="1000000000")
    assert (late.status, late.calls) == (0, [])
    assert "the time is up" in late.said
    torchrun.write_text(f"{RECORDER}exit 3\n")
    assert launch(name, STOP_AT=str(int(time.time()) + 100)).status == 3


def test_ranks_that_lose_those_of_another_node_to_the_time_have_not_failed(launch, everything):
    wait = "while (($(date +%s) < STOP_AT)); do sleep 0.01; done\nexit 1\n"
    (launch.programs / "torchrun").write_text(f"{RECORDER}{wait}")
    lost = launch("transfer_pile", STOP_AT=str(int(time.time()) + 2))
    assert (lost.status, len(lost.calls)) == (0, 1), lost.errors
    assert lost.said.endswith("the time is up; the same command goes on from here\n")


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("size", ["", "tiny"])
def test_a_corpus_that_is_missing_is_told_in_a_line(launch, name, size):
    refused = launch(name, SIZE=size)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert re.match(r"error: there is no corpus in runs/[^:]+/1-corpus: ", line)
    if size:
        assert "make quickstart leaves a small one there" in line
    else:
        recipe = re.search(r"OUTPUT=(runs/\S+/1-corpus) bash (\S+) makes it", line)
        assert recipe is not None
        assert Path(recipe[2]).is_file()


@pytest.mark.parametrize(
    ("name", "arguments", "choices", "told"),
    [
        ("pretrain_684m", (), {"SIZE": "huge"}, "SIZE=huge: no such size; choose from 60m, 82m"),
        ("pretrain_684m", (), {"MIXTURE": "doremi"}, "no mixture runs/slimpajama/4-mixture/doremi"),
        ("pretrain_1_2b", (), {}, "no mixture runs/slimpajama/4-mixture/chameleon-pretrain.json"),
        ("pretrain_684m", ("--seed", "3"), {}, "--seed: choices are environment variables"),
        ("finetune_stack", (), {"PRETRAINED": "lost"}, "there is no run lost to start from: "),
    ],
)
def test_a_mistake_is_told_in_a_line(launch, everything, name, arguments, choices, told):
    (everything / "runs/slimpajama/4-mixture/chameleon-pretrain.json").unlink()
    refused = launch(name, *arguments, **choices)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_an_environment_that_is_not_active_is_told_in_a_line(launch, everything, tmp_path):
    programs = tmp_path / "no torchrun"
    programs.mkdir()
    for name in ("bash", "basename", "dirname", "date"):
        (programs / name).symlink_to(shutil.which(name))
    refused = launch("pretrain_684m", PATH=str(programs))
    assert (refused.status, len(refused.errors.splitlines())) == (2, 1)
    assert "there is no torchrun in the PATH: 'make setup' installs it" in refused.errors


@pytest.mark.parametrize("name", LAUNCHERS)
def test_help_says_what_it_reproduces_and_which_choices_there_are(launch, name):
    helped = launch(name, "--help")
    assert (helped.status, helped.calls, helped.errors) == (0, [], "")
    for word in (
        "SIZE",
        "RUN",
        "CORPUS",
        "MIXTURE",
        "SEED",
        "TP, PP",
        "NPROC",
        "NNODES",
        "STOP_AT",
    ):
        assert re.search(rf"^  {word} ", helped.said, re.MULTILINE), word
    assert "set -euo" not in helped.said
    told = re.findall(r"examples/(\w+\.sh)", helped.said)
    assert f"{name}.sh" in told
    assert all((EXAMPLES / path).is_file() for path in told)


@pytest.mark.parametrize(
    "path",
    sorted(EXAMPLES.rglob("*.sh")) + sorted(EXAMPLES.rglob("*.sbatch")),
    ids=lambda p: p.name,
)
def test_every_script_parses(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
