"""Test the commands that the launchers of examples/ run, and the user errors that they reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.evaluation.options import PAPER_TASKS
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.options import OutputOptions
from megatron_chameleon.methods.sweep.options import AxisOptions
from tests.unit.launched import (
    EXAMPLES,
    WEIGHING,
    Launched,
    Launcher,
    rejected,
    succeeded,
    write_everything,
)

# Launcher -> model size, steps, batch size and learning rates, as in the paper.
PROXY_RATES, BASE_RATES = (5e-4, 1e-4), (1.5e-4, 5e-5)
PAPER: dict[str, tuple[str, int, int, tuple[float, float]]] = {
    "pretrain_60m_proxy": ("60m", 2000, 128, PROXY_RATES),
    "pretrain_82m_proxy": ("82m", 2000, 128, PROXY_RATES),
    "pretrain_124m_proxy": ("124m", 2000, 128, PROXY_RATES),
    "pretrain_210m_proxy": ("210m", 2000, 128, PROXY_RATES),
    "pretrain_684m": ("684m", 20000, 128, BASE_RATES),
    "pretrain_1_2b": ("1.2b", 20000, 128, BASE_RATES),
    "pretrain_684m_pile": ("684m", 20000, 512, BASE_RATES),
    "finetune_wiki40b": ("684m", 10000, 128, BASE_RATES),
    "finetune_stack": ("684m", 10000, 128, BASE_RATES),
}
BASELINES = sorted(f"baselines/{path.stem}" for path in (EXAMPLES / "baselines").glob("*.sh"))
MODEL_FREE = [f"baselines/{name}" for name in ("manual", "mixmin", "natural", "uniform", "unimax")]


@pytest.fixture
def launch(tmp_path):
    """``launch(name, *arguments, **choices)``: run a launcher whose default inputs all exist."""
    write_everything(tmp_path)
    return Launcher(tmp_path)


@pytest.mark.parametrize(
    ("command", "choices", "named"),
    [
        ("baselines/doge --seed 3", {}, "--seed"),
        ("pretrain_684m", {"MIXTURE": "doremi"}, "runs/slimpajama/4-mixture/doremi"),
        ("finetune_stack", {"PRETRAINED": "lost"}, "lost"),
        ("transfer_pile", {"PROXY": "lost"}, "lost"),
        ("evaluate_downstream", {"RUN": "nowhere"}, "nowhere/5-base"),
        ("baselines/manual", {"PUBLISHED": "pile/human slimpajama/doge"}, "slimpajama/doge"),
        ("pretrain_684m", {"SETTINGS": "paper"}, "SETTINGS=paper"),
        ("pretrain_llama_1b", {"SETTINGS": "authors"}, "SETTINGS=authors"),
        ("pretrain_684m", {"BASE_STEPS": "10k"}, "BASE_STEPS=10k"),
        ("doge_pile", {"CORPUS": "lost"}, "data/pile.sh"),
        ("finetune_huggingface hub/model", {"RUN": "other"}, "INPUT"),
        ("finetune_huggingface runs", {"INPUT": "a=text/a"}, "config.json"),
    ],
)
def test_user_mistakes_are_rejected_before_anything_starts(launch, command, choices, named):
    assert named in rejected(launch(*command.split(), **choices))


def test_quickstart_compares_three_mixtures(launch, tmp_path):
    (tmp_path / "first/2-proxy/nano-seed1").mkdir(parents=True)  # is also the uniform model
    launched = succeeded(launch("quickstart", RUN="first", STEPS="9", WARMUP="2"))
    training = launched.training()
    assert {options.train_iters for options in training} == {9}
    assert {options.mixture for options in training} == {
        "uniform",
        "first/4-mixture/chameleon-pretrain.json",
        "first/4-mixture/mixmin.json",
    }
    (mixmin,) = [call.options for call in method_calls(launched) if "mixmin" in str(call.options)]
    assert mixmin.target == "reference_prose"
    assert launched.calls[-1].options.runs == (Path("first"),)
    assert "first" in launched.printed


# Training


@pytest.mark.parametrize("name", PAPER)
def test_launcher_trains_what_it_reproduces(launch, name):
    size, steps, batch, rates = PAPER[name]
    training = succeeded(launch(name)).training()
    assert training
    for options in training:
        assert (options.model, options.train_iters) == (size, steps)
        assert (options.global_batch_size, options.seq_length) == (batch, 1024)
        assert (options.optimizer.lr, options.optimizer.min_lr) == rates
        assert options.bf16


@pytest.mark.parametrize(
    "name", ["pretrain_82m_proxy", "pretrain_684m", "pretrain_684m_pile", "finetune_stack"]
)
def test_base_steps_change_the_base_models_and_the_tokens_of_their_mixtures(launch, name):
    (run, *_) = succeeded(launch(name, BASE_STEPS="3000")).training()
    is_base = name.startswith("pretrain") and not name.endswith("proxy")
    assert run.train_iters == (3000 if is_base else PAPER[name][1])
    if is_base:
        data_set = "pile" if name.endswith("pile") else "slimpajama"
        choices = {"PUBLISHED": f"{data_set}/doremi", "BASE_STEPS": "3000"}
        (call,) = method_calls(launch("baselines/manual", **choices))
        assert call.options.token_budget == 3000 * run.global_batch_size * run.seq_length


def test_the_authors_settings_are_those_of_their_code(launch):
    (ours,) = succeeded(launch("pretrain_684m")).training()
    (theirs,) = succeeded(launch("pretrain_684m", SETTINGS="authors")).training()
    assert (theirs.optimizer.adam_beta2, theirs.bf16) == (0.999, False)
    assert (theirs.hidden_dropout, theirs.attention_dropout) == (0.1, 0.1)
    assert theirs.architecture.openai_gelu
    assert theirs.train_iters == ours.train_iters
    assert (ours.optimizer.adam_beta2, ours.bf16) == (0.95, True)
    assert ours.hidden_dropout == ours.attention_dropout == 0
    assert not ours.architecture.openai_gelu


# Launcher -> proxy, tokens of the base runs in billions, learning rates.
LLAMAS = {
    "130m": ("llama-15m", 2.62, (1e-3, 1e-4)),
    "350m": ("llama-30m", 7.86, (5e-4, 5e-5)),
    "1b": ("llama-30m", 25.17, (3e-4, 3e-5)),
}


@pytest.mark.parametrize("size", LLAMAS)
def test_llama_launcher_compares_uniform_and_chameleon_weights(launch, size):
    proxy_size, tokens, rates = LLAMAS[size]
    flags = ("--", "--weight-decay", "0.3")
    launched = succeeded(launch(f"pretrain_llama_{size}", *flags, TP="2"))
    proxy, *base = launched.training()
    run = Path(f"runs/llama-{size}")
    assert (proxy.model, proxy.run_dir) == (proxy_size, run / f"2-proxy/{proxy_size}-seed1")
    assert (proxy.train_iters, proxy.mixture) == (2000, "uniform")
    mixtures = ["uniform", f"{run}/4-mixture/chameleon-pretrain.json"]
    assert [options.mixture for options in base] == mixtures
    for options in base:
        assert options.model == f"llama-{size}"
        total = options.train_iters * options.global_batch_size * options.seq_length
        assert round(total / 1e9, 2) == tokens
        assert (options.optimizer.lr, options.optimizer.min_lr) == rates
        assert options.optimizer.weight_decay == 0.3
        assert options.bf16
        assert options.parallel.use_distributed_optimizer
        assert options.parallel.tensor_model_parallel_size == 2
    weigh, evaluation = launched.calls[1].options, launched.calls[-2].options
    assert weigh.checkpoint == proxy.run_dir
    assert list(evaluation.checkpoint) == [(options.run_dir,) for options in base]


@pytest.mark.parametrize("name", ["pretrain_82m_proxy", "pretrain_684m"])
def test_pretraining_choices(launch, name, tmp_path):
    (tmp_path / "weights.json").touch()
    choices = {"TP": "2", "PP": "3", "NPROC": "6", "SEED": "7", "RUN": "my run", "SIZE": "210m"}
    choices |= {"CORPUS": "runs/stack/1-corpus", "MIXTURE": "weights.json"}
    flags = ("--", "--train-iters", "7", "--lr-warmup-iters", "1")
    (call,) = succeeded(launch(name, *flags, **choices)).calls
    options = call.options
    assert (call.program, call.ranks.nproc_per_node) == ("torchrun", "6")
    assert options.parallel.tensor_model_parallel_size == 2
    assert options.parallel.pipeline_model_parallel_size == 3
    assert (options.seed, options.corpus) == (7, Path("runs/stack/1-corpus"))
    assert (options.mixture, options.model) == ("weights.json", "210m")
    assert (options.train_iters, options.optimizer.lr_warmup_iters) == (7, 1)
    folder = "2-proxy/210m-seed7" if name.endswith("proxy") else "5-base/weights-seed7"
    assert options.run_dir == Path("my run") / folder


def test_several_nodes_meet_on_the_first(launch):
    choices = {"NNODES": "4", "SLURM_NODEID": "2", "MASTER_ADDR": "node7", "NPROC": "8"}
    (call,) = launch("pretrain_1_2b", MIXTURE="uniform", **choices).calls
    assert (call.ranks.nnodes, call.ranks.node_rank, call.ranks.master_addr) == ("4", 2, "node7")
    assert (call.ranks.nproc_per_node, call.ranks.standalone) == ("8", False)
    # These launchers also run python, but only on the first node.
    for name in ("finetune_stack", "baselines/regmix", "baselines/unimax"):
        others = succeeded(launch(name, NNODES="2", NODE_RANK="1", MASTER_ADDR="first"))
        assert {call.program for call in others.calls} <= {"torchrun"}


# Mixtures


@pytest.mark.parametrize("name", WEIGHING)
def test_chameleon_choices(launch, name, tmp_path):
    (tmp_path / "model").mkdir()
    windows = {
        (call.options.extraction.num_windows, call.options.extraction.window_length)
        for call in launch(name).calls
    }
    assert windows == {(4096, 512)}
    choices = {"TP": "2", "NPROC": "4", "RUN": "my run", "CORPUS": "runs/stack/1-corpus"}
    choices |= {"PROXY": "model", "PRETRAINED": "model"}
    calls = succeeded(launch(name, "--", "--ridge", "3", "--num-windows", "99", **choices)).calls
    assert calls[0].ranks.nproc_per_node == "4"
    assert calls[0].options.parallel.tensor_model_parallel_size == 2
    for call in calls:
        options = call.options
        assert (options.weighting.ridge, options.extraction.num_windows) == (3.0, 99)
        assert (options.checkpoint, options.corpus) == (Path("model"), Path("runs/stack/1-corpus"))
        assert options.output.parent == Path("my run/4-mixture")


def test_sweep_is_the_papers(launch):
    (call,) = succeeded(launch("sweep_stability")).calls
    options = call.options
    assert options.axes == AxisOptions(
        sweep_steps=(1000, 2000, 5000, 10000),
        sweep_model=("60m", "82m", "124m", "210m"),
        sweep_ridge=(1.0, 10.0, 100.0),
        sweep_num_windows=(2048, 4096, 8192),
    )
    proxy = options.proxy
    assert (proxy.model, proxy.train_iters, proxy.global_batch_size) == ("82m", 2000, 128)
    assert (proxy.optimizer.lr, proxy.optimizer.min_lr, proxy.bf16) == (5e-4, 1e-4, True)
    assert (options.output, call.program) == (Path("runs/slimpajama"), "torchrun")


def test_sweep_of_a_baseline_is_over_the_steps_of_its_proxy(launch):
    (call,) = succeeded(launch("sweep_stability", METHOD="doremi")).calls
    options = call.options
    assert (options.method, options.output) == ("doremi", Path("runs/sweep-doremi"))
    assert options.axes == AxisOptions(sweep_steps=(1000, 2000, 5000, 10000))
    assert (options.proxy.model, options.proxy.train_iters) == ("82m", 10_000)
    assert "METHOD=regmix" in rejected(launch("sweep_stability", METHOD="regmix"))


def method_calls(launched: Launched):
    calls = [c for c in succeeded(launched).calls if isinstance(c.options, OutputOptions)]
    assert calls
    return calls


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_computes_a_mixture_by_its_method(launch, name):
    launched = launch(name)
    options: Any = method_calls(launched)[-1].options
    method = name.partition("/")[2].replace("_", "-")
    assert options.corpus == Path("runs/slimpajama/1-corpus")
    assert options.output.parent == Path("runs/slimpajama/4-mixture")
    assert type(options) is find_methods()[method].options
    if name in MODEL_FREE:
        assert {call.program for call in launched.calls} == {"python"}
        assert options.token_budget == 20_000 * 128 * 1024  # the base model's tokens
    choices = {"RUN": "my run", "CORPUS": "runs/stack/1-corpus", "NPROC": "3"}
    for call in method_calls(launch(name, "--", "--token-budget", "77", **choices)):
        assert call.options.corpus == Path("runs/stack/1-corpus")
        assert call.options.output.parent == Path("my run/4-mixture")
        assert call.options.token_budget == 77
        assert call.ranks is None or call.ranks.nproc_per_node == "3"


def test_published_mixtures_are_those_of_the_papers_tables(launch):
    calls = method_calls(launch("baselines/manual"))
    columns = ["doremi", "doge", "chameleon", "regmix"]
    assert [call.options.published for call in calls] == [f"slimpajama/{c}" for c in columns]
    assert [call.options.output.stem for call in calls] == [f"printed-{c}" for c in columns]
    for column, base in (
        ("pile/human", "pretrain_684m_pile"),
        ("wiki40b/chameleon-finetune", "finetune_wiki40b"),
        ("stack/chameleon-finetune", "finetune_stack"),
    ):
        data_set, _, name = column.partition("/")
        (call,) = method_calls(launch("baselines/manual", PUBLISHED=column))
        options = call.options
        assert (options.published, options.corpus) == (column, Path(f"runs/{data_set}/1-corpus"))
        assert options.output == Path(f"runs/{data_set}/4-mixture/printed-{name}.json")
        (run,) = launch(base, MIXTURE="uniform").training()
        assert options.token_budget == run.train_iters * run.global_batch_size * run.seq_length


def test_downstream_tasks_are_the_papers(launch, tmp_path):
    base = Path("runs/slimpajama/5-base")
    for name in ("uniform-seed1", "chameleon-pretrain-seed1"):
        (tmp_path / base / name).mkdir(parents=True, exist_ok=True)
    calls = succeeded(launch("evaluate_downstream")).calls
    options = next(c.options for c in calls if c.options.checkpoint == base / "uniform-seed1")
    assert len(calls) == len(list((tmp_path / base).iterdir()))
    assert options.output == Path("runs/slimpajama/6-evaluation/uniform-seed1-downstream.json")
    assert (options.tasks, options.shots, options.limit) == (PAPER_TASKS, (0, 1, 2, 3, 4, 5), None)
