"""Test examples/compare_methods.sh: the paper's settings, failed jobs and invalid settings.

tests/launchers runs the script with the real programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from megatron_chameleon.methods.mixmin import MixminOptions
from megatron_chameleon.methods.options import OutputOptions
from megatron_chameleon.report.options import CompareMethodsOptions, ReportOptions
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

NAME = "compare_methods"
CORPUS = "runs/quickstart/1-corpus"
# The lock prevents concurrent programs from mixing their lines.
ONE_AT_A_TIME = '#!/usr/bin/env bash\nexec 9>> "$CALLS.lock"\nflock 9\n'
# Write outputs like the real programs: a finished run, or a mixture whose weights depend on
# its name. A command fails if the name of its output begins with $FAILS.
WORKER = """
while (($#)); do
  case $1 in
    --output | --run-dir)
      mkdir -p "$(dirname "$2")"
      if [[ -n ${FAILS:-} && $2 == */$FAILS* ]]; then
        echo "error: it is $FAILS" >&2
        exit 2
      fi
      case $1:$2 in
        *:*/1-corpus) mkdir -p "$2"; touch "$2/corpus.json" ;;
        --run-dir:*) mkdir -p "$2"; echo '{"status": "finished"}' > "$2/run.json" ;;
        *) weight=$(cksum <<< "$(basename "$2" .json)" | cut -c-8)
          printf '{"kind": "mixture", "format_version": 1, "method": "it",
            "weights": {"a": 0.%09d, "b": 0.%09d}}' "$weight" "$((1000000000 - weight))" > "$2" ;;
      esac
      ;;
  esac
  shift
done
"""
# Run the real comparison, for which the stand-ins' evaluations are complete.
COMPARISON = f"""#!/usr/bin/env bash
if [[ "$1 $2" == "-m megatron_chameleon.experiments.compare" ]]; then
  shift 2
  PYTHONPATH={EXAMPLES.parent} exec {sys.executable} -c "
from megatron_chameleon.experiments import compare
compare.require_results = lambda options: None
compare.main()" "$@"
fi
"""


class Workers(Launcher):
    """A launcher whose fake programs write the results that later stages read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("torchrun", "python"):
            text = f"{COMPARISON}{ONE_AT_A_TIME}{RECORDER}exec 9>&-\n{WORKER}"
            (self.programs / name).write_text(text)


def small(launch: Launcher, **choices: str) -> Launched:
    return launch(
        NAME, **{"SIZE": "mini", "CORPUS": CORPUS, "METHODS": "uniform chameleon"} | choices
    )


@pytest.fixture
def launch(tmp_path):
    write_everything(tmp_path)
    return Workers(tmp_path)


def started(launched: Launched) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return options of methods by mixture name, of proxy runs, and of base runs."""
    runs = succeeded(launched).training()
    methods = [c.options for c in launched.calls if isinstance(c.options, OutputOptions)]
    proxies = [run for run in runs if run.run_dir.parent.name == "2-proxy"]
    bases = [run for run in runs if run.run_dir.parent.name == "5-base"]
    return {options.output.stem: options for options in methods}, proxies, bases


def evaluated_tasks(launched: Launched) -> list[Path]:
    """Return the runs that were evaluated on the paper's downstream tasks."""
    found = [c.options for c in launched.calls if isinstance(c.options, DownstreamOptions)]
    assert {options.tasks for options in found} <= {PAPER_TASKS}
    return [options.checkpoint for options in found]


def test_failed_job_holds_back_only_its_dependents(launch):
    launched = small(launch, FAILS="chameleon.json")
    assert launched.status == 1
    names = {run.run_dir.name for run in launched.training()}
    assert "uniform-seed3" in names
    assert not any(name.startswith("chameleon") for name in names)
    assert "failed: chameleon, with status 2" in launched.errors
    assert "error: it is chameleon.json" in launched.errors  # the last line of its log
    assert not any(isinstance(call.options, CompareMethodsOptions) for call in launched.calls)
    assert small(launch).status == 0


def test_experiment_on_slimpajama(launch):
    (launch.folder / "runs/slimpajama/4-mixture/chameleon-pretrain.json").unlink()
    chosen = "uniform chameleon-pretrain doremi doge surrogate regmix"
    launched = launch(NAME, SIZE="paper", METHODS=chosen, SEEDS="1 2 3")
    methods, (proxy,), bases = started(launched)
    assert set(methods) == set(chosen.split())
    assert (proxy.model, proxy.train_iters, proxy.seed) == ("82m", 2000, 1)
    chameleon = methods["chameleon-pretrain"]
    assert chameleon.checkpoint == proxy.run_dir
    extraction = chameleon.extraction
    assert (extraction.num_windows, extraction.window_length) == (4096, 512)
    for name in ("doremi", "doge"):
        assert (methods[name].proxy.model, methods[name].proxy.train_iters) == ("82m", 10000)
    regmix, surrogate = methods["regmix"], methods["surrogate"]
    assert (regmix.num_proxies, regmix.target, surrogate.target) == (200, "cc", None)
    assert surrogate.runs_folder == regmix.runs_folder  # they use the same proxies
    for field in ("num_proxies", "sampling", "swarm"):
        assert getattr(surrogate, field) == getattr(regmix, field)
    assert list(methods).index("regmix") < list(methods).index("surrogate")
    assert len(bases) == 3 * len(methods)
    for run in bases:
        assert (run.model, run.train_iters, run.global_batch_size) == ("684m", 20000, 128)
        assert (run.optimizer.lr, run.optimizer.min_lr, run.bf16) == (1.5e-4, 5e-5, True)
        budget = run.train_iters * run.global_batch_size * run.seq_length
        assert {
            options.token_budget
            for name, options in methods.items()
            if name != "chameleon-pretrain"
        } == {budget}
    assert {run.run_dir for run in bases} == set(evaluated_tasks(launched))
    # The report compares with the paper's figures.
    assert isinstance(launched.calls[-1].options, ReportOptions)
    # A larger base model is trained with the same mixtures, in its own folder.
    larger = launch(NAME, EXPERIMENT="slimpajama-1.2b", METHODS="uniform doremi natural")
    methods, proxies, bases = started(larger)
    assert (set(methods), proxies) == ({"natural"}, [])
    assert {run.model for run in bases} == {"1.2b"}
    assert {run.run_dir.parent for run in bases} == {Path("runs/slimpajama-1.2b/5-base")}
    assert len(evaluated_tasks(larger)) == len(bases) == 9
    assert (launch.folder / "runs/slimpajama/4-mixture/natural.json").exists()


def test_experiment_on_the_pile(launch):
    (launch.folder / "runs/pile/4-mixture/chameleon-pretrain.json").unlink()
    launched = launch(NAME, EXPERIMENT="pile")
    methods, proxies, bases = started(launched)
    assert proxies == []
    for name in ("human", "doremi", "regmix"):
        assert methods[f"printed-{name}"].published == f"pile/{name}"
    assert methods["doge"].proxy.train_iters == 10_000
    chameleon = methods["chameleon-pretrain"]
    assert chameleon.checkpoint == Path("runs/slimpajama/2-proxy/82m-seed1")
    assert {options.corpus for options in methods.values()} == {Path("runs/pile/1-corpus")}
    assert len(bases) == len(evaluated_tasks(launched)) == 15
    for run in bases:
        assert (run.model, run.train_iters, run.global_batch_size) == ("684m", 20000, 512)
    (table,) = (c.options for c in launched.calls if isinstance(c.options, CompareMethodsOptions))
    assert (table.baseline, table.existing_model) == ("printed-human", True)


def test_experiment_with_fine_tuning(launch):
    for mode in ("pretrain", "finetune"):
        (launch.folder / f"runs/wiki40b/4-mixture/chameleon-{mode}.json").unlink()
    launched = launch(NAME, EXPERIMENT="wiki40b")
    methods, proxies, bases = started(launched)
    tuned = Path("runs/pile/5-base/chameleon-pretrain-seed1")
    for mode in ("pretrain", "finetune"):
        options = methods[f"chameleon-{mode}"]
        assert (options.mode, options.checkpoint) == (mode, tuned)
    assert (proxies, len(bases), evaluated_tasks(launched)) == ([], 9, [])
    for run in bases:
        assert (run.pretrained_checkpoint, run.train_iters) == (tuned, 10_000)
        assert (run.global_batch_size, run.optimizer.lr) == (128, 1.5e-4)


def test_experiment_is_held_to_its_settings(launch):
    choices = {"EXPERIMENT": "stack", "METHODS": "uniform chameleon-finetune"}
    started(launch(NAME, **choices))
    launched = launch(NAME, **choices, SEEDS="1 2 3 4")  # a seed may be added
    assert {run.seed for run in launched.training()} == {4}
    assert {str(run.corpus) for run in launched.training()} == {"runs/stack/1-corpus"}
    assert "runs/stack" in rejected(launch(NAME, "--", "--lr", "1e-3", **choices))


def test_small_setting_trains_online_methods_and_fine_tunes_its_models(launch):
    launched = launch(NAME, SIZE="small", CORPUS=CORPUS, METHODS="uniform odm", SEEDS="1 2 3")
    methods, proxies, bases = started(launched)
    assert (set(methods), proxies, len(bases)) == ({"uniform"}, [], 6)
    for run in bases:
        name = run.run_dir.name.rpartition("-seed")[0]
        method = {"odm": "odm"}.get(name)
        mixture = "runs/compare-small/installed/4-mixture/uniform.json"
        assert (run.online.online, run.mixture) == (method, "uniform" if method else mixture)
        assert run.train_iters * run.global_batch_size * run.seq_length >= 2e6
        assert (run.data.permutation, run.validation.eval_interval) == ("epoch", 200)
    trained = "runs/compare-small/installed"
    methods, proxies, tuned = started(
        launch(NAME, SIZE="small", CORPUS=CORPUS, PRETRAINED=trained, SEEDS="1 2 3")
    )
    modes = {name: getattr(options, "mode", None) for name, options in methods.items()}
    assert modes == {
        "uniform": None, "chameleon-finetune": "finetune", "chameleon-pretrain": "pretrain"
    }  # fmt: skip
    assert str(methods["chameleon-finetune"].checkpoint) == f"{trained}/5-base/uniform-seed1"
    assert (proxies, len(tuned)) == ([], 9)
    for run in tuned:
        assert str(run.pretrained_checkpoint) == f"{trained}/5-base/uniform-seed{run.seed}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("leave-one-out", ["my notes", "a/b"]), ("a/b, my notes", ["a/b", "my notes"])],
)
def test_names_of_targets_may_have_spaces(launch, value, expected):
    domains = dict.fromkeys(("my notes", "a/b"))
    (launch.folder / CORPUS / "corpus.json").write_text(json.dumps({"domains": domains}))
    launched = small(launch, TARGETS=value, METHODS="uniform mixmin", RUN="run")
    held_out, weighed, compared = [], [], []
    trained: dict[str, None] = {}
    for options in (call.options for call in succeeded(launched).calls):
        if isinstance(options, ImportOptions):
            held_out.append(options.held_out)
        elif isinstance(options, MixminOptions):
            weighed.append(options.target)
        elif isinstance(options, PretrainOptions):
            trained[options.run_dir.parents[1].name] = None
        elif isinstance(options, CompareMethodsOptions) and options.targets is not None:
            compared.append(list(options.targets))
    assert held_out == weighed == expected
    assert compared == [expected]
    assert list(trained) == [file_name_of(name) for name in expected]


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"SIZE": "small", "PRETRAINED": "lost"}, "PRETRAINED=lost"),
        ({"METHODS": "uniform odm"}, "odm requires SIZE=small"),
        ({"SIZE": "paper", "CORPUS": "lost"}, "lost"),
        ({"EXPERIMENT": "pile"}, "SIZE=mini"),
        ({"EXPERIMENT": "piles", "SIZE": "paper"}, "EXPERIMENT=piles"),
        ({"EXPERIMENT": "stack", "SIZE": "paper", "PRETRAINED": "lost"}, "lost"),
        ({"EXPERIMENT": "pile", "SIZE": "paper", "BASE": "1.2b"}, "slimpajama-1.2b"),
        ({"METHODS": "uniform printed-human"}, "printed-human requires EXPERIMENT"),
        ({"SEEDS": "1 2"}, "--seeds 1 2"),
        ({"SEEDS": "1 2 x"}, "SEEDS"),
        ({"SIZE": "small", "JOBS_AT_ONCE": "0"}, "JOBS_AT_ONCE=0"),
        ({"STOP_AT": "soon"}, "STOP_AT=soon"),
    ],
)
def test_mistakes_are_rejected_before_any_work(launch, tmp_path, choices, named):
    common = {"SIZE": "mini", "CORPUS": CORPUS, "RUN": "run", "METHODS": "uniform doge"}
    assert named in rejected(launch(NAME, **common | choices))
    assert not (tmp_path / "run").exists()
