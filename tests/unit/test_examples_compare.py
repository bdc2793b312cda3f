"""examples/compare_methods.sh: the jobs it starts, their order, and how they wait and resume."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_chameleon.evaluation.options import PerplexityToolOptions
from megatron_chameleon.methods.chameleon.options import ChameleonOptions
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.options import MethodOptions
from megatron_chameleon.report.options import CompareMethodsOptions
from megatron_chameleon.training.options import PretrainOptions
from tests.unit.launched import (
    EXAMPLES,
    RECORDER,
    Launched,
    Launcher,
    rejected,
    succeeded,
    write_everything,
)

RUN = Path("runs/compare-mini")
NAME = "compare_methods"
METHODS = ["uniform", "natural", "unimax", "chameleon", "doremi", "doge", "regmix", "mixing-laws"]
CORPUS = "runs/quickstart/1-corpus"
# Concurrent programs write whole lines.
ONE_AT_A_TIME = '#!/usr/bin/env bash\nexec 9>> "$CALLS.lock"\nflock 9\n'
# Writes the outputs of the real program: a mixture whose weights depend on its name (UniMax's are
# uniform's), a finished run, a result. The command that writes to a path with $FAILS in it fails
# with status $FAILS_WITH.
WORKER = """
while (($#)); do
  case $1 in
    --output | --run-dir)
      mkdir -p "$(dirname "$2")"
      if [[ -n ${FAILS:-} && $2 == */$FAILS* ]]; then
        echo "error: it is $FAILS" >&2
        exit "${FAILS_WITH:-2}"
      fi
      case $1 in
        --run-dir) mkdir -p "$2"; echo '"status": "finished"' > "$2/run.json" ;;
        *) name=$(basename "$2" .json); name=${name/unimax/uniform}
          printf '  "weights": {\\n    "a": 0.%09d\\n  }\\n' \\
            "$(cksum <<< "$name" | cut -c-8)" > "$2" ;;
      esac
      ;;
  esac
  shift
done
"""
# The real tool checks the choice. An evaluation is valid unless it contains "of other weights";
# tests/launchers calls the real check of evaluations.
CHECKS = f"""#!/usr/bin/env bash
case " $* " in
  *" --check choice "*) exec {sys.executable} "$@" ;;
  *" --check evaluations "*)
    [[ " $* " =~ " --run "([^ ]*)" --mixtures "([^ ]*)" " ]] || exit 1
    ! grep -qs "of other weights" "${{BASH_REMATCH[1]}}/6-evaluation/${{BASH_REMATCH[2]}}-seed"*
    exit ;;
esac
"""


class Workers(Launcher):
    """A launcher whose programs write results, on which later stages depend."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("torchrun", "python"):
            text = f"{CHECKS}{ONE_AT_A_TIME}{RECORDER}exec 9>&-\n{WORKER}"
            (self.programs / name).write_text(text)


def small(launch: Launcher, **choices: str) -> Launched:
    return launch(
        NAME, **{"SIZE": "mini", "CORPUS": CORPUS, "METHODS": "uniform chameleon"} | choices
    )


def papers(launch: Launcher, **choices: str) -> Launched:
    return launch(NAME, **{"SIZE": "paper", **choices})


@pytest.fixture
def launch(tmp_path):
    write_everything(tmp_path)
    return Workers(tmp_path)


def kinds(launched: Launched) -> list[type]:
    return [type(call.options) for call in launched.calls]


def started(launched: Launched) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Methods by name of the mixture, proxy runs and base runs."""
    runs = succeeded(launched).training()
    methods = [c.options for c in launched.calls if isinstance(c.options, MethodOptions)]
    proxies = [run for run in runs if run.run_dir.parent.name == "2-proxy"]
    bases = [run for run in runs if run.run_dir.parent.name == "5-base"]
    return {options.output.stem: options for options in methods}, proxies, bases


def test_mini_compares_all_methods_within_an_hour(launch):
    """By the estimated seconds of its jobs on two cores; the longest start first."""
    assert {*METHODS, "manual"} <= {*find_methods()}
    launched = launch(NAME, SIZE="mini", CORPUS=CORPUS)
    methods, proxies, bases = started(launched)
    assert set(methods) == {*METHODS}
    begun = re.findall(r"started: (\S+) ", launched.printed)
    assert begun[:5] == ["proxy", "regmix", "doremi", "mixing-laws", "doge"]
    (minutes,) = re.findall(r"all jobs take about (\d+) minutes", launched.printed)
    assert 45 <= int(minutes) <= 58
    assert len(proxies) == 1
    # UniMax's mixture is Uniform's here, so it needs no base runs.
    assert {run.run_dir.name.rpartition("-seed")[0] for run in bases} == {*METHODS} - {"unimax"}


def test_jobs_start_after_those_they_depend_on(launch):
    launched = small(launch)
    _, (proxy,), bases = started(launched)
    assert len(bases) == 2 * 3
    for run in bases:
        name, _, seed = run.run_dir.name.rpartition("-seed")
        assert (run.mixture, str(run.seed)) == (str(RUN / f"4-mixture/{name}.json"), seed)
        assert (run.model_size, run.train_iters, run.corpus) == ("nano", 800, Path(CORPUS))
        assert run.optimizer == bases[0].optimizer
    assert (proxy.mixture, proxy.run_dir) == ("uniform", RUN / "2-proxy/nano-seed1")
    order = kinds(launched)
    chameleon = launched.calls[order.index(ChameleonOptions)].options
    assert chameleon.checkpoint == proxy.run_dir
    assert order.index(PretrainOptions) < order.index(ChameleonOptions)
    trained = set()
    for call in launched.calls:
        if isinstance(call.options, PretrainOptions):
            trained.add(call.options.run_dir.name)
        elif isinstance(call.options, PerplexityToolOptions):
            for one in call.options.one_by_one():
                assert one.checkpoint.name in trained
                assert one.output == RUN / f"6-evaluation/{one.checkpoint.name}.json"
    last = launched.calls[-1].options
    assert isinstance(last, CompareMethodsOptions)
    assert (last.mixtures, last.seeds) == (("uniform", "chameleon"), (1, 2, 3))


def test_same_command_resumes_and_adds(launch, tmp_path):
    assert small(launch).status == 0
    assert kinds(small(launch)) == [CompareMethodsOptions]
    (tmp_path / RUN / "5-base/chameleon-seed2/run.json").write_text('"status": "running"')
    (tmp_path / RUN / "6-evaluation/chameleon-seed2.json").unlink()
    third = small(launch)
    assert kinds(third) == [PretrainOptions, PerplexityToolOptions, CompareMethodsOptions]
    assert third.calls[0].options.run_dir.name == "chameleon-seed2"
    assert "chameleon-seed2" in [o.output.stem for o in third.calls[1].options.one_by_one()]
    # tools/evaluate.py keeps the results of the same weights, and replaces the others.
    (tmp_path / RUN / "6-evaluation/chameleon-seed2.json").write_text("of other weights")
    again = small(launch)
    assert kinds(again) == [PerplexityToolOptions, CompareMethodsOptions]
    assert not any(options.overwrite for options in again.calls[0].options.one_by_one())
    _, _, bases = started(small(launch, METHODS="uniform chameleon natural", SEEDS="1 2 3 4"))
    added = {"chameleon-seed4", "uniform-seed4", *(f"natural-seed{seed}" for seed in range(1, 5))}
    assert {run.run_dir.name for run in bases} == added
    assert "other settings" in rejected(small(launch, PROXY_SEED="2"))


def test_failed_job_holds_back_only_its_dependents(launch):
    choices = {"METHODS": "uniform natural chameleon"}
    launched = small(launch, FAILS="chameleon.json", **choices)
    assert launched.status == 1
    names = {run.run_dir.name for run in launched.training()}
    assert {"uniform-seed3", "natural-seed3"} < names
    assert not any(name.startswith("chameleon") for name in names)
    assert "failed: chameleon, with status 2" in launched.errors
    assert "error: it is chameleon.json" in launched.errors  # the last line of its log
    assert CompareMethodsOptions not in kinds(launched)
    assert small(launch, **choices).status == 0


@pytest.mark.parametrize(
    ("tool", "fails", "message"),
    [
        ("evaluate.py", "uniform-seed1.json", "stopped: uniform-evaluation"),
        ("pretrain_gpt.py", "uniform-seed1", "failed: uniform-seed1, with status 1"),
        ("pretrain_gpt.py", "", "done: uniform-seed1"),
    ],
)
def test_job_ended_by_the_time_limit_has_not_failed(launch, tool, fails, message):
    """STOP_AT passes while ``tool`` runs. Training has its own time limit, and exits cleanly."""
    date = launch.programs / "date"
    date.write_text('#!/usr/bin/env bash\n[ -e "$CALLS.late" ] && echo 2000 || echo 1000\n')
    date.chmod(0o755)
    torchrun = launch.programs / "torchrun"
    passes = f'[[ -z "{tool}" || " $* " != *"{tool} "* ]] || touch "$CALLS.late"\n'
    torchrun.write_text(torchrun.read_text().replace(WORKER, passes + WORKER))
    choices = {"METHODS": "uniform natural", "FAILS": fails, "FAILS_WITH": "1", "STOP_AT": "2000"}
    launched = papers(launch, **choices)
    assert message in launched.printed + launched.errors
    assert launched.status == (1 if message.startswith("failed") else 0)


def test_paper_setting(launch):
    chosen = "uniform chameleon doremi doge regmix"
    methods, (proxy,), bases = started(papers(launch, METHODS=chosen, SEEDS="1 2 3"))
    assert set(methods) == set(chosen.split())
    assert (proxy.model_size, proxy.train_iters, proxy.seed) == ("82m", 2000, 1)
    assert methods["chameleon"].checkpoint == proxy.run_dir
    assert methods["chameleon"].extraction.num_windows == 4096
    for name in ("doremi", "doge"):
        assert (methods[name].proxy.model_size, methods[name].proxy.train_iters) == ("82m", 10000)
    assert (methods["regmix"].num_proxies, methods["regmix"].target) == (200, "cc")
    assert len(bases) == 3 * len(methods)
    for run in bases:
        assert (run.model_size, run.train_iters, run.global_batch_size) == ("684m", 10000, 128)
        assert (run.optimizer.lr, run.optimizer.min_lr, run.bf16) == (1.5e-4, 5e-5, True)
    # The larger base model has its own runs with the same mixtures.
    larger = papers(launch, BASE="1.2b", METHODS="uniform doremi")
    methods, proxies, bases = started(larger)
    assert (methods, proxies) == ({}, [])
    names = {f"{name}-1.2b-seed{seed}" for name in ("uniform", "doremi") for seed in (1, 2, 3)}
    assert {run.run_dir.name for run in bases} == names
    # Shorter proxies have names of their own.
    compared = papers(launch, VARIANT="2k").calls[-1].options
    assert compared.mixtures == ("uniform", "chameleon", "doremi-2k", "doge-2k")


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"SIZE": "huge"}, "SIZE=huge"),
        ({"SIZE": "paper", "CORPUS": "lost"}, "lost"),
        ({"SEEDS": "1 2"}, "--seeds 1 2"),
        ({"SEEDS": "1 2 x"}, "SEEDS"),
        ({"METHODS": "uniform regmax"}, "regmax"),
    ],
)
def test_mistakes_are_rejected_before_any_work(launch, tmp_path, choices, named):
    common = {"SIZE": "mini", "CORPUS": CORPUS, "RUN": "run", "METHODS": "uniform doge"}
    assert named in rejected(launch(NAME, **common | choices))
    assert not (tmp_path / "run").exists()


def test_sigterm_ends_the_running_jobs(tmp_path):
    """The signal goes to the script alone, as from a scheduler."""
    script = tmp_path / "script.sh"
    script.write_text(
        f"set -euo pipefail\nRUN={tmp_path}\nmkdir -p {tmp_path}/logs\n"
        f"source {EXAMPLES / 'jobs.sh'}\nwork() {{ exec sleep 600; }}\n"
        "for name in one two three; do job $name 600 '' false work; done\nrun_jobs 2\n"
    )
    with subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(3)]
        assert [line.split(" (")[0] for line in begun[1:]] == ["started: one", "started: two"]
        time.sleep(0.2)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    assert len(children) == 2
    assert not any(child.is_running() for child in children)
