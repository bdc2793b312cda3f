"""What examples/compare_methods.sh starts, in which order, and how its jobs wait and go on."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.evaluation.options import PerplexityToolOptions
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.common.registry import find_methods
from megatron_chameleon.options.head_to_head import CompareMethodsOptions
from megatron_chameleon.options.mixture import MethodOptions
from megatron_chameleon.options.training import PretrainOptions
from tests.unit.compared import CORPUS, METHODS, NAME, WORKER, Workers, papers, small
from tests.unit.launched import EXAMPLES, Launched, write_everything


@pytest.fixture
def launch(tmp_path):
    write_everything(tmp_path)
    return Workers(tmp_path)


def made(launched: Launched) -> tuple[list[Any], list[PretrainOptions], list[PretrainOptions]]:
    """The mixtures, the proxy and the base runs that were asked for."""
    assert launched.status == 0, launched.errors + launched.said
    runs = launched.training()
    mixtures = [c.options for c in launched.calls if isinstance(c.options, MethodOptions)]
    proxies = [run for run in runs if run.run_dir.parent.name == "2-proxy"]
    return mixtures, proxies, [run for run in runs if run.run_dir.parent.name == "5-base"]


def test_mini_puts_all_methods_to_the_test_within_an_hour(launch):
    """On two quiet cores, by the seconds that jobs are said to take; the longest begin first."""
    assert {*METHODS, "manual"} <= {*find_methods()}
    launched = launch(NAME, SIZE="mini", CORPUS=CORPUS)
    mixtures, proxies, bases = made(launched)
    assert {options.output.stem for options in mixtures} == {*METHODS}
    begun = re.findall(r"begun: (\S+) ", launched.said)
    assert begun[:5] == ["proxy", "regmix", "doremi", "mixing-laws", "doge"]
    (minutes,) = re.findall(r"all jobs together take about (\d+) minutes", launched.said)
    assert 45 <= int(minutes) <= 58
    assert len(proxies) == 1
    assert {run.run_dir.name.rpartition("-seed")[0] for run in bases} == {*METHODS} - {"unimax"}


def test_all_base_models_differ_in_mixture_and_seed_alone(launch):
    _, (proxy,), bases = made(small(launch))
    assert len(bases) == 2 * 3
    assert {run.seed for run in bases} == {1, 2, 3}
    for run in bases:
        name, _, seed = run.run_dir.name.rpartition("-seed")
        assert (run.mixture, str(run.seed)) == (f"runs/compare-mini/4-mixture/{name}.json", seed)
        assert (run.model_size, run.train_iters, run.corpus) == ("nano", 800, Path(CORPUS))
        assert run.optimizer == bases[0].optimizer
    assert (proxy.mixture, proxy.run_dir) == (
        "uniform",
        Path("runs/compare-mini/2-proxy/nano-seed1"),
    )


def test_what_is_needed_comes_first(launch):
    launched = small(launch)
    assert launched.status == 0, launched.errors
    kinds = [type(call.options) for call in launched.calls]
    chameleon = kinds.index(ChameleonOptions)
    assert launched.calls[chameleon].options.checkpoint == Path(
        "runs/compare-mini/2-proxy/nano-seed1"
    )
    assert kinds.index(PretrainOptions) < chameleon
    places: dict[str, int] = {}
    for i, call in enumerate(launched.calls):
        if isinstance(call.options, PretrainOptions):
            places[call.options.run_dir.name] = i
    evaluations = [i for i, kind in enumerate(kinds) if kind is PerplexityToolOptions]
    for i in evaluations:
        for one in launched.calls[i].options.one_by_one():
            assert places[one.checkpoint.name] < i
            assert one.output == Path(f"runs/compare-mini/6-evaluation/{one.checkpoint.name}.json")
    assert kinds[-1] is CompareMethodsOptions
    assert launched.calls[-1].options.mixtures == ("uniform", "chameleon")
    assert launched.calls[-1].options.seeds == (1, 2, 3)


def test_each_process_of_mini_has_one_rank(launch):
    assert {call.program for call in small(launch).calls} == {"python"}
    one_at_a_time = small(launch, JOBS_AT_ONCE="1", NPROC="2", RUN="other")
    ranks = [call.ranks.nproc_per_node for call in one_at_a_time.calls[:-1]]
    assert set(ranks) == {"2"}


def test_the_command_goes_on_with_what_is_not_there(launch, tmp_path):
    assert small(launch).status == 0
    again = small(launch)
    assert [type(call.options) for call in again.calls] == [CompareMethodsOptions]
    run = tmp_path / "runs/compare-mini"
    (run / "5-base/chameleon-seed2/run.json").write_text('"status": "running"')
    (run / "6-evaluation/chameleon-seed2.json").unlink()
    third = small(launch)
    assert [type(call.options) for call in third.calls] == [
        PretrainOptions,
        PerplexityToolOptions,
        CompareMethodsOptions,
    ]
    assert third.calls[0].options.run_dir.name == "chameleon-seed2"
    assert "chameleon-seed2" in [o.output.stem for o in third.calls[1].options.one_by_one()]
    assert "9 of 11 jobs are done" in third.said


def test_an_evaluation_of_other_weights_is_made_again(launch, tmp_path):
    """tools/evaluate.py, which is given all seeds, keeps those that are of the same weights."""
    assert small(launch).status == 0
    folder = tmp_path / "runs/compare-mini/6-evaluation"
    (folder / "chameleon-seed2.json").write_text("of other weights")
    again = small(launch)
    assert again.status == 0, again.errors
    assert [type(c.options) for c in again.calls] == [PerplexityToolOptions, CompareMethodsOptions]
    asked = again.calls[0].options.one_by_one()
    assert [o.output.stem for o in asked] == [f"chameleon-seed{seed}" for seed in (1, 2, 3)]
    assert not any(options.overwrite for options in asked)


def test_mixtures_and_seeds_may_be_added_and_settings_may_not(launch):
    assert small(launch).status == 0
    _, _, bases = made(small(launch, METHODS="uniform chameleon natural", SEEDS="1 2 3 4"))
    assert sorted(run.run_dir.name for run in bases) == [
        "chameleon-seed4",
        *(f"natural-seed{seed}" for seed in (1, 2, 3, 4)),
        "uniform-seed4",
    ]
    refused = small(launch, BASE_STEPS="900")
    assert (refused.status, refused.calls) == (2, [])
    assert refused.errors.startswith("error: runs/compare-mini was begun with other settings, ")


@pytest.mark.parametrize("size", ["mini", "paper"])
def test_mixtures_are_of_one_seed_of_the_proxies(launch, size):
    choices = {"SIZE": size, "METHODS": "uniform doremi"}
    if size == "mini":
        choices["CORPUS"] = CORPUS
    assert launch(NAME, **choices).status == 0
    refused = launch(NAME, **choices, PROXY_SEED="2")
    assert (refused.status, refused.calls) == (2, [])
    assert "was begun with other settings, which " in refused.errors
    assert launch(NAME, **choices, PROXY_SEED="1").status == 0
    if size == "paper":
        assert launch(NAME, **choices, PROXY_SEED="2", BASE="1.2b").status == 2


def test_what_fails_holds_back_only_what_waits_for_it(launch):
    launched = small(launch, METHODS="uniform natural chameleon", FAILS="chameleon.json")
    assert launched.status == 1
    names = {run.run_dir.name for run in launched.training()}
    assert {"uniform-seed3", "natural-seed3"} < names
    assert not any(name.startswith("chameleon") for name in names)
    assert "failed: chameleon, with status 2" in launched.errors
    assert "logs/chameleon.log ends with: error: it is chameleon.json" in launched.errors
    assert "1 jobs failed, and 4 wait for them" in launched.errors
    assert not any(isinstance(call.options, CompareMethodsOptions) for call in launched.calls)
    assert small(launch, METHODS="uniform natural chameleon").status == 0


def test_a_method_that_was_asked_to_stop_has_not_failed(launch):
    launched = small(launch, METHODS="uniform natural", FAILS="natural.json", FAILS_WITH="75")
    assert (launched.status, launched.errors) == (0, "")
    assert "left: natural, before its end; the same command goes on from here" in launched.said
    assert not any(isinstance(call.options, CompareMethodsOptions) for call in launched.calls)
    assert small(launch, METHODS="uniform natural").status == 0


@pytest.mark.parametrize(
    ("time_comes_in", "fails", "told"),
    [
        ("evaluate.py", "uniform-seed1.json", "left: uniform-evaluation, before its end"),
        ("evaluate.py", "", "done: uniform-evaluation"),
        ("", "uniform-seed1.json", "failed: uniform-evaluation, with status 1"),
        ("pretrain_gpt.py", "uniform-seed1", "failed: uniform-seed1, with status 1"),
        ("pretrain_gpt.py", "", "done: uniform-seed1"),
    ],
)
def test_a_job_that_is_ended_by_the_time_has_not_failed(launch, time_comes_in, fails, told):
    """Nor has one that lost ranks of another node to it. Training leaves by itself."""
    date = launch.programs / "date"
    date.write_text('#!/usr/bin/env bash\n[ -e "$CALLS.late" ] && echo 2000 || echo 1000\n')
    date.chmod(0o755)
    torchrun = launch.programs / "torchrun"
    comes = f'[[ -z "{time_comes_in}" || " $* " != *"{time_comes_in} "* ]] || touch "$CALLS.late"\n'
    torchrun.write_text(torchrun.read_text().replace(WORKER, comes + WORKER))
    choices = {"METHODS": "uniform natural", "FAILS": fails, "FAILS_WITH": "1", "STOP_AT": "2000"}
    launched = papers(launch, **choices)
    assert told in launched.said + launched.errors
    assert launched.status == (1 if told.startswith("failed") else 0)


def test_every_job_tells_how_much_is_left(launch):
    said = small(launch).said
    assert "0 of 11 jobs are done; 2 at a time" in said
    for number in range(1, 12):
        assert f"({number} of 11); about " in said
    assert "(11 of 11); about 0 minutes left" in said


def test_a_record_is_asked_for_with_the_command(launch):
    launched = small(launch, RECORD="benchmarks/mini.json", SEEDS="4 5 6")
    options = launched.calls[-1].options
    assert options.record == Path("benchmarks/mini.json")
    assert options.command == (
        "SIZE=mini METHODS=uniform\\ chameleon SEEDS=4\\ 5\\ 6 "
        f"CORPUS={CORPUS} bash examples/compare_methods.sh"
    )
    assert options.wall_seconds is not None


def test_the_papers_setting(launch):
    """The base models of its table, and every proxy as its own launcher trains it."""
    launched = papers(launch)
    mixtures, (proxy,), bases = made(launched)
    by_name = {options.output.stem: options for options in mixtures}
    assert set(by_name) == {*METHODS}
    assert [*by_name][:4] == ["mixing-laws", "doremi", "regmix", "doge"]  # the longest first
    assert {options.corpus for options in mixtures} == {Path("runs/slimpajama/1-corpus")}
    assert (proxy.model_size, proxy.train_iters, proxy.seed) == ("82m", 2000, 1)
    assert by_name["chameleon"].checkpoint == proxy.run_dir
    assert by_name["chameleon"].extraction.num_windows == 4096
    for name in ("doremi", "doge"):
        assert (by_name[name].proxy.model_size, by_name[name].proxy.train_iters) == ("82m", 10000)
    assert (by_name["regmix"].num_proxies, by_name["regmix"].target) == (200, "cc")
    assert len(bases) == 3 * len(set(METHODS) - {"unimax"})
    for run in bases:
        assert (run.model_size, run.train_iters, run.global_batch_size) == ("684m", 10000, 128)
        assert (run.optimizer.lr, run.optimizer.min_lr, run.bf16) == (1.5e-4, 5e-5, True)
    assert {call.program for call in launched.calls[:1]} == {"torchrun"}


def test_the_papers_proxies_of_two_thousand_steps(launch):
    mixtures, _, bases = made(papers(launch, VARIANT="2k", METHODS="uniform chameleon doremi-2k"))
    by_name = {options.output.stem: options for options in mixtures}
    assert by_name["doremi-2k"].proxy.train_iters == 2000
    assert by_name["doremi-2k"].proxy.model_size == "82m"
    assert {run.run_dir.name for run in bases} == {
        f"{name}-seed{seed}"
        for name, seed in itertools.product(("uniform", "chameleon", "doremi-2k"), (1, 2, 3))
    }


def test_without_a_gpu_they_have_as_many_steps_as_chameleons(launch):
    mixtures, (proxy,), _ = made(small(launch, METHODS="chameleon doremi doremi-2k uniform"))
    steps = {o.output.stem: o.proxy.train_iters for o in mixtures if "doremi" in o.output.stem}
    assert steps["doremi-2k"] == proxy.train_iters < steps["doremi"]


def test_the_columns_of_the_papers_table_of_two_thousand_steps(launch):
    launched = papers(launch, VARIANT="2k")
    assert launched.status == 0, launched.errors
    compared = launched.calls[-1].options
    assert compared.mixtures == ("uniform", "chameleon", "doremi-2k", "doge-2k")
    assert compared.name == "compare_methods-2k"


def test_the_larger_base_model_has_runs_of_its_own_by_the_same_mixtures(launch):
    choices = {"METHODS": "uniform doremi"}
    assert papers(launch, **choices).status == 0
    launched = papers(launch, BASE="1.2b", **choices)
    mixtures, proxies, bases = made(launched)
    assert (mixtures, proxies) == ([], [])
    assert {run.model_size for run in bases} == {"1.2b"}
    assert {run.run_dir.name for run in bases} == {
        f"{name}-1.2b-seed{seed}" for name in ("uniform", "doremi") for seed in (1, 2, 3)
    }
    assert launched.calls[-1].options.run_suffix == "-1.2b"


def test_the_time_that_is_left_is_kept(launch):
    launched = papers(launch, METHODS="uniform natural", STOP_AT="1000000000")
    assert launched.status == 0, launched.errors
    assert launched.training() == []
    assert "left: uniform, before its end" in launched.said
    assert launched.calls == []
    assert not any(isinstance(call.options, CompareMethodsOptions) for call in launched.calls)


def test_what_is_ended_ends_its_commands(tmp_path):
    """The signal goes to the script alone, as from a scheduler; its two commands end with it."""
    script = tmp_path / "script.sh"
    script.write_text(
        f"set -euo pipefail\nRUN={tmp_path}\nmkdir -p {tmp_path}/logs\n"
        f"source {EXAMPLES / 'jobs.sh'}\nwork() {{ exec sleep 600; }}\n"
        "for name in one two three; do job $name 600 '' false work; done\nrun_jobs 2\n"
    )
    with subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(3)]
        assert [line.split(" (")[0] for line in begun[1:]] == ["begun: one", "begun: two"]
        time.sleep(0.2)
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    assert len(children) == 2
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_help_names_the_choices(launch):
    helped = launch(NAME, "--help")
    assert (helped.status, helped.calls, helped.errors) == (0, [], "")
    words = (
        "SIZE",
        "VARIANT",
        "BASE",
        "METHODS",
        "SEEDS",
        "BASELINE",
        "PROXY_SEED",
        "RUN",
        "CORPUS",
    )
    for word in (*words, "JOBS_AT_ONCE", "RECORD", "TP, PP", "NPROC", "STOP_AT"):
        assert f"\n  {word} " in helped.said


def test_the_corpus_of_mini_is_that_of_the_quickstart():
    recipe = (EXAMPLES / "data/installed_text.sh").read_text()
    quickstart = (EXAMPLES / "quickstart.sh").read_text()
    for setting in ("3500000", "--vocab-size 8192", "--split 80,10,10", "20000"):
        assert setting in recipe
        assert setting in quickstart
