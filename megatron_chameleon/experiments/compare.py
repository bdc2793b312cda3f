"""The comparison of methods: its jobs, and the tables of their results.

``examples/compare_methods.sh`` starts it with ``python -m megatron_chameleon.experiments.compare
LAUNCHERS TORCHRUN_FLAGS -- FLAGS`` and documents the environment variables.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import read_json
from megatron_chameleon.cli import INTERRUPTED_STATUS, exit_with_error, start
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.experiments.settings import (
    HINT,
    VARIABLES,
    Check,
    Environment,
    Flags,
    Settings,
    comparison_options,
    corpus_hint,
    is_finished,
    read_settings,
    require_valid,
)
from megatron_chameleon.methods.online.options import online_columns
from megatron_chameleon.report.compare_methods import require_results
from megatron_chameleon.report.run_folder import DOWNSTREAM_SUFFIX, same_weights
from megatron_chameleon.study.executor import Job, State, read_clock, run_jobs

TOOL = ("-m", "megatron_chameleon")
PYTHON = ("python", *TOOL)
MINUTES_LEFT = "--exit-duration-in-mins"
# Methods whose mixture can be for a target that is not trained on.
FOR_TARGETS = ("mixmin", "doge", "regmix", "surrogate", "mixing-laws")
SHARED_STAGES = ("2-proxy", "3-embeddings", "4-mixture")
# Seconds of jobs at full size on an H100; only their ratios matter.
SECONDS_ON_H100 = {
    "proxy": 2800,
    "doremi": 26600,
    "doge": 22700,
    "doremi-2k": 5300,
    "doge-2k": 5300,
    "regmix": 25000,
    "mixing-laws": 1000000,
    "base": 201600,
    "tasks": 3600,
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The jobs of one comparison.

    The proxy embeds the domains for Chameleon's mixtures. Every column needs a mixture, a base
    model of each seed, and their evaluations.
    """

    settings: Settings

    def jobs(self) -> list[Job]:
        """All jobs, longest first, so that no long job runs alone at the end."""
        settings = self.settings
        jobs = list[Job]()
        proxy: Flags = ("proxy",) if self._trains_proxy() else ()
        if proxy:
            jobs.append(self._proxy())
        computed = [name for name in settings.methods if name not in online_columns()]
        for name in sorted(computed, key=self.seconds_for, reverse=True):
            after = proxy if settings.embeds(name) else ()
            if name == "surrogate" and "regmix" in computed:
                after = ("regmix",)
            jobs.append(self._mixture(name, after))
        uniform = [name for name in settings.methods if name == "uniform"]
        for name in settings.methods:
            after = () if name in online_columns() else (name, *uniform)
            bases = [self._base(name, seed, after) for seed in settings.seeds]
            jobs += bases
            names = [job.name for job in bases]
            jobs.append(self._evaluation(name, names))
            if settings.tasks:
                jobs.append(self._tasks(name, names))
        return jobs

    def _trains_proxy(self) -> bool:
        return not self.settings.has_proxy and any(map(self.settings.embeds, self.settings.methods))

    def _job(
        self,
        name: str,
        work: Flags,
        done: Callable[[], bool],
        after: Sequence[str] = (),
        *,
        kind: str = "",
        time_limit: str | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> Job:
        settings = self.settings
        return Job(
            name=name,
            work=work,
            done=done,
            after=after,
            log=None if settings.at_once == 1 else self.log(name),
            seconds=self.seconds_for(kind or name),
            environment={**settings.environment, **(environment or {})},
            time_limit=time_limit,
        )

    def log(self, name: str) -> Path:
        """Log of a job."""
        return Path(self.settings.run, "logs", f"{name}.log")

    def _launcher(
        self,
        name: str,
        launcher: str,
        flags: Flags,
        done: Callable[[], bool],
        after: Sequence[str] = (),
        *,
        kind: str = "",
        **environment: str,
    ) -> Job:
        """A job that runs another launcher with the paper's settings."""
        settings = self.settings
        variables: dict[str, str | None] = {
            "MIXTURE": None,
            "SIZE": "tiny" if settings.size == "tiny" else None,
            "RUN": settings.run,
            "CORPUS": settings.corpus,
            "SEED": settings.proxy_seed,
            "RECIPE": settings.recipe,
            **environment,
        }
        if settings.at_once != 1:
            variables["NPROC"] = "1"
        command = ("bash", f"{settings.launchers}/{launcher}.sh", "--", *flags)
        return self._job(
            *(name, command, done, after),
            kind=kind,
            time_limit="STOP_AT",
            environment=variables,
        )

    def _proxy(self) -> Job:
        settings = self.settings

        def done() -> bool:
            return is_finished(settings.proxy)

        if settings.experiment:
            return self._launcher("proxy", "pretrain_82m_proxy", (), done)
        assert settings.steps is not None
        command = (*settings.start, *TOOL, "pretrain_gpt", *settings.proxy_flags)
        command += ("--train-iters", str(settings.steps.proxy), "--corpus", settings.corpus)
        command += ("--mixture", "uniform", "--run-dir", settings.proxy)
        return self._job("proxy", command, done, time_limit=MINUTES_LEFT)

    def _mixture(self, name: str, after: Sequence[str]) -> Job:
        settings, path = self.settings, self.settings.mixture_file(name)
        flags: Flags = ("--output", f"{settings.run}/4-mixture/{name}.json")
        method = name.removesuffix("-2k")
        if settings.embeds(name):
            if name == "chameleon-finetune":
                flags += ("--mode", "finetune")
            elif name in ("chameleon-paper", "chameleon-scaled"):
                flags += ("--recipe", name.removeprefix("chameleon-"))
            elif name.startswith("chameleon-target-"):
                mode = name.removeprefix("chameleon-target-")
                flags += ("--mode", mode, "--target", settings.target)
            store = f"{settings.run}/3-embeddings/{settings.proxy.rpartition('/')[2]}"
            command = (*settings.start, *TOOL, "compute_mixture", *settings.embed, *flags)
            command += ("--checkpoint", settings.proxy, "--store", store)
            return self._job(name, command, path.exists, after)
        if name.startswith("printed-"):
            column = f"{settings.experiment}/{name.removeprefix('printed-')}"
            return self._launcher(
                *(name, "baselines/manual", (), path.exists, after),
                PUBLISHED=column.replace("slimpajama-1.2b", "slimpajama"),
            )
        budget = ("--token-budget", str(settings.budget))
        if settings.experiment:
            flags += budget
            if name != method and settings.size != "tiny":
                flags += ("--train-iters", "2000")  # paper: tab:ppl_2k, "2k steps"
            launcher = f"baselines/{method.replace('-', '_')}"
            return self._launcher(name, launcher, flags, path.exists, after)
        method, more = self._flags_of(method, is_short=name != method)
        if settings.target and method in FOR_TARGETS:
            more += ("--target", settings.target)
        command = (*settings.start, *TOOL, "compute_mixture", "--method", method)
        command += ("--corpus", settings.corpus, *budget, *flags, *more)
        return self._job(name, command, path.exists, after)

    def _flags_of(self, column: str, *, is_short: bool) -> tuple[str, Flags]:
        """Method and flags of a column of small settings that trains proxies."""
        settings, steps = self.settings, self.settings.steps
        assert steps is not None
        if column in ("doremi", "doge"):
            train_iters = str(steps.proxy if is_short else steps.long_proxy)
            flags = (*settings.proxy_flags, "--train-iters", train_iters, "--accept-uncertain")
            return column, flags
        if column == "regmix":
            proxies = ("--num-proxies", str(steps.regmix), "--accept-uncertain")
            return column, (*settings.swarm, *proxies)
        if column == "surrogate":
            # It is fitted to RegMix's proxies. If no gain is certain, before the proxies or after,
            # its mixture is uniform.
            flags = (*settings.swarm, "--num-proxies", str(steps.regmix))
            flags += ("--work-dir", f"{settings.run}/4-mixture/regmix", "--prior", "uniform")
            return column, flags
        if column == "mixing-laws":
            proxies = ("--num-proxies", str(steps.laws), "--accept-uncertain")
            return column, (*settings.swarm, *proxies)
        if column == "mixmin-experts":  # one model per domain, which all targets share
            _, model, *others = settings.proxy_flags
            flags = ("--experts", model, *others, "--train-iters", str(steps.proxy))
            return "mixmin", (*flags, "--work-dir", settings.expert_runs)
        return column, ()

    def _base(self, name: str, seed: str, after: Sequence[str]) -> Job:
        settings, online = self.settings, online_columns().get(name)
        run_dir = f"{settings.run}/5-base/{name}-seed{seed}"
        mixture: Flags = ("--mixture", f"{settings.run}/4-mixture/{name}.json")
        if online:
            mixture = ("--mixture", "uniform", "--online", online)
        if initial := settings.initial_run(seed):
            mixture += ("--pretrained-checkpoint", initial)
        command = (*settings.start, *TOOL, "pretrain_gpt", *settings.train, "--seed", seed)
        return self._job(
            f"{name}-seed{seed}",
            (*command, *mixture, "--run-dir", run_dir),
            lambda: is_finished(run_dir) or self.is_uniform(name),
            after,
            kind="base",
            time_limit=MINUTES_LEFT,
        )

    def _evaluation(self, name: str, after: Sequence[str]) -> Job:
        settings = self.settings
        command = (*settings.start, *TOOL, "evaluate", "perplexity", *settings.evaluate)
        for run in self._runs(name):  # the tool skips existing results of the same weights
            command += ("--checkpoint", f"{settings.run}/5-base/{run}")
            command += ("--output", f"{settings.run}/6-evaluation/{run}.json")
        job = f"{name}-evaluation"
        return self._job(
            *(job, command, lambda: self.has_results(name, "evaluations"), after),
            kind="evaluation",
        )

    def _tasks(self, name: str, after: Sequence[str]) -> Job:
        runs = [f"{self.settings.run}/5-base/{run}" for run in self._runs(name)]
        return self._launcher(
            *(f"{name}-tasks", "evaluate_downstream", ()),
            *(lambda: self.has_results(name, "downstream"), after),
            kind="tasks",
            CHECKPOINTS=" ".join(runs),
        )

    def _runs(self, name: str) -> list[str]:
        return [f"{name}-seed{seed}" for seed in self.settings.seeds]

    def is_uniform(self, name: str) -> bool:
        """Whether a column's mixture equals uniform, which is among the columns, too."""
        settings = self.settings
        files = settings.mixture_file(name), settings.mixture_file("uniform")
        if name == "uniform" or "uniform" not in settings.methods:
            return False
        if name in online_columns() or not all(file.exists() for file in files):
            return False
        ours, uniform = map(Mixture.load, files)
        return same_weights(ours.weights, uniform.weights)

    def has_results(self, name: str, check: Check) -> bool:
        """Whether all results of a column exist and belong to the current weights."""
        settings, is_tasks = self.settings, check == "downstream"
        if self.is_uniform(name):
            return True
        suffix = DOWNSTREAM_SUFFIX if is_tasks else ""
        folder = Path(settings.run, "6-evaluation")
        if not all((folder / f"{run}{suffix}.json").exists() for run in self._runs(name)):
            return False
        try:
            require_results(comparison_options(settings, check, name))
        except UserError as error:
            with self.log(f"{name}-{'tasks' if is_tasks else 'evaluation'}").open("a") as log:
                log.write(f"error: {error}\n")
            return False
        return True

    def seconds_for(self, name: str) -> float:
        """Approximate seconds of a job; only their ratios matter."""
        settings, steps = self.settings, self.settings.steps
        if name == "surrogate" and "regmix" not in settings.methods:  # it trains the proxies
            return self.seconds_for("regmix")
        if steps is None:
            return SECONDS_ON_H100.get(name, 600)
        members = {"regmix": steps.regmix, "mixing-laws": steps.laws}
        trained = {  # steps of one model; DoReMi trains two
            "proxy": steps.proxy,
            "base": steps.base,
            "doremi": 2.7 * steps.long_proxy,
            "doremi-2k": 2.7 * steps.proxy,
            "doge": 1.4 * steps.long_proxy,
            "doge-2k": 1.4 * steps.proxy,
            "mixmin-experts": 8 * steps.proxy,  # of eight domains
            **{method: steps.member * count for method, count in members.items()},
        }
        if name in trained:
            return trained[name] * 10 // steps.in_10_s + (10 if name in ("proxy", "base") else 20)
        return 45 if name == "evaluation" else 15

    def hold_to_settings(self) -> None:
        """Raise UserError for a run folder that was started with other settings."""
        settings, steps = self.settings, self.settings.steps
        proxies = f"seed of the proxies: {settings.proxy_seed}\n"
        if steps is None:
            proxies += f"settings: {settings.size} {settings.hyperparameters}"
        else:
            proxies += (
                f"proxies: {' '.join(settings.proxy_flags)}, {steps.proxy} and {steps.long_proxy} "
                f"steps\nswarms: {' '.join(settings.swarm)}, {steps.regmix} and {steps.laws} "
                f"members\nembeddings: {' '.join(settings.embed)}"
            )
        initial = f" from {settings.pretrained}" if settings.pretrained else ""
        bases = f"base models: {' '.join(settings.train)}{initial}\n"
        bases += f"evaluation: {' '.join(settings.evaluate)}"
        for path, text in (
            (Path(settings.shared or settings.run, "logs/settings-proxies.txt"), proxies),
            (Path(settings.run, "logs/settings.txt"), bases),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(f"{text}\n")
            if path.read_text().rstrip("\n") != text.rstrip("\n"):
                raise UserError(
                    f"{settings.run} was started with other settings (see {path}); use those, or "
                    "another RUN"
                )

    def link_shared(self) -> None:
        """Let the run folder use the proxies, embeddings and mixtures of ``shared``."""
        for stage in SHARED_STAGES if self.settings.shared else ():
            theirs, ours = Path(self.settings.shared, stage), Path(self.settings.run, stage)
            theirs.mkdir(parents=True, exist_ok=True)
            if not ours.exists():
                ours.symlink_to(theirs.resolve())

    def run(self, deadline: float | None) -> State:
        """Run all jobs; see :func:`~megatron_chameleon.study.executor.run_jobs`."""
        settings = self.settings
        self.hold_to_settings()
        self.link_shared()
        jobs = self.jobs()
        if not settings.experiment:
            minutes = sum(job.seconds for job in jobs) / settings.at_once / 60
            print(f"all jobs take about {minutes:.0f} minutes on an idle machine")
        clock = Path(settings.run, "logs/seconds")
        return run_jobs(jobs, settings.at_once, clock, deadline)

    def tabulate(self, *flags: str) -> None:
        """Write and print the table, and for the paper's experiments the report."""
        settings = self.settings
        names = ["--mixtures", *settings.methods, "--seeds", *settings.seeds]
        command = [*PYTHON, "compare_methods", "--run", settings.run, *names]
        command += ["--baseline", settings.baseline, *flags]
        if settings.target:
            with Path(settings.run, "logs/comparison.txt").open("wb") as output:
                self.call(command, output)
            return
        self.call(command)
        if settings.experiment:  # the report shows the paper's figures next to those of the runs
            baseline = f"{settings.baseline}-seed{settings.seeds[0]}"
            report = [*PYTHON, "make_report", settings.run, "--baseline", baseline]
            self.call(report)

    def call(self, command: Sequence[str], output: IO[bytes] | None = None) -> None:
        """Run a command that needs no job; raise CalledProcessError if it fails."""
        variables = {**os.environ, **self.settings.environment}
        subprocess.run(command, env=variables, stdout=output, check=True)


def prepare_corpus(settings: Settings, environment: Environment) -> None:
    """Make the corpus of small settings, if it does not exist."""
    path = Path(settings.corpus, "corpus.json")
    if settings.size != "tiny" and not settings.experiment and not path.exists():
        name = environment.get("CORPUS_NAME") or "installed"
        print(f"\n== Text: {name}", flush=True)
        variables = {**environment, **settings.environment, "OUTPUT": settings.corpus}
        command = ["bash", f"{settings.launchers}/data/{name}_text.sh"]
        subprocess.run(command, env=variables, check=True)
    if not path.exists():
        hint = corpus_hint(settings.launchers, settings.corpus, None, settings.size == "tiny")
        raise UserError(f"no corpus at {settings.corpus}; {hint}")


def find_targets(targets: str, corpus: str) -> list[str]:
    """Return the domains that TARGETS names.

    Raises:
        UserError: for an unknown domain, or if no domain is named.
    """
    path = f"{corpus}/corpus.json"
    domains = list(read_json(Path(path), HINT)["domains"])
    if targets == "leave-one-out":
        names = domains
    elif targets in domains:
        names = [targets]
    else:
        names = [
            name.strip() for name in (targets.split(",") if "," in targets else targets.split())
        ]
    names = list(filter(None, dict.fromkeys(names)))
    for name in names:
        if name not in domains:
            raise UserError(f"TARGETS={targets}: {name} is not a domain of {path}")
    if not names:
        raise UserError(f"TARGETS={targets}: names no domain")
    return names


def record_flags(environment: Environment, extra: Flags) -> Flags:
    """Flags of compare_methods for RECORD, with the command line of the comparison."""
    if not environment.get("RECORD"):
        return ()
    values = [
        f"{name}={shlex.quote(environment[name])}" for name in VARIABLES if environment.get(name)
    ]
    command = [*values, "bash examples/compare_methods.sh"]
    if extra:
        command.append(f"-- {' '.join(extra)}")
    return ("--record", environment["RECORD"], "--command", " ".join(command))


def compare(environment: Environment, launchers: str, ranks: Flags, extra: Flags) -> int:
    """Run a comparison, or one for each of TARGETS.

    Returns:
        0, 1 if a job failed, or STOPPED_STATUS at the deadline.
    """
    settings = read_settings(environment, launchers, ranks, extra)
    require_valid(settings)
    stop_at = environment.get("STOP_AT") or None
    try:
        deadline = None if stop_at is None else float(stop_at)
    except ValueError:
        raise UserError(f"STOP_AT={stop_at}: must be a Unix time, as of 'date +%s'") from None
    prepare_corpus(settings, environment)
    comparison = Comparison(settings)
    record = record_flags(environment, extra)
    if settings.targets:
        names = find_targets(settings.targets, settings.corpus)
        folders = [f"{settings.run}/targets/{file_name_of(name)}" for name in names]
        for name, folder in zip(names, folders, strict=True):
            if not Path(folder, "1-corpus/corpus.json").exists():
                command = [*PYTHON, "import_corpus", "--corpus", settings.corpus]
                command += ["--held-out", name, "--output", f"{folder}/1-corpus"]
                comparison.call(command)
        for name, folder in zip(names, folders, strict=True):
            print(f"\n== target: {name}", flush=True)
            assert settings.steps is not None
            changes = {
                "TARGETS": "",
                "RECORD": "",
                "TARGET": name,
                "RUN": folder,
                "CORPUS": f"{folder}/1-corpus",
                "EXPERT_RUNS": settings.expert_runs,
                "METHODS": " ".join(settings.methods),
                "SEEDS": " ".join(settings.seeds),
                "BASE_STEPS": str(settings.steps.base),
            }
            status = compare({**environment, **changes}, launchers, ranks, extra)
            if status:
                return status
        comparison.tabulate("--targets", *names, *record)
        return 0
    state = comparison.run(deadline)
    if state != "done":
        return 1 if state == "failed" else STOPPED_STATUS
    node = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or "0"
    if node == "0":
        flags = ["--name", f"compare_methods{'-' if settings.variant else ''}{settings.variant}"]
        if settings.has_proxy:
            flags.append("--existing-model")
        if record:
            seconds = read_clock(Path(settings.run, "logs/seconds"))
            flags += [*record, "--wall-seconds", f"{seconds}"]
        comparison.tabulate(*flags)
    return 0


def main() -> NoReturn:
    """Run the comparison that the environment variables choose, and exit the process."""
    start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    launchers, *flags = sys.argv[1:]
    end = flags.index("--")
    try:
        status = compare(os.environ, launchers, tuple(flags[:end]), tuple(flags[end + 1 :]))
    except UserError as error:
        exit_with_error(str(error), 0)
    except subprocess.CalledProcessError as error:  # it has printed its own error
        status = error.returncode
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    sys.exit(0 if status == STOPPED_STATUS else status)


if __name__ == "__main__":
    main()
