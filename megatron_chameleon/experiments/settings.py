"""Settings of the comparison of methods: models, steps and flags of each SIZE and EXPERIMENT.

They are chosen by environment variables, which examples/compare_methods.sh documents.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.files import read_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.online.options import online_columns
from megatron_chameleon.report.compare_methods import require_choice
from megatron_chameleon.report.options import CompareMethodsOptions

Flags = tuple[str, ...]
Environment = Mapping[str, str]
Check = Literal["choice", "evaluations", "downstream"]
# Variables that are recorded as the command line of the comparison.
VARIABLES = (
    *("SIZE", "EXPERIMENT", "VARIANT", "SETTINGS", "CORPUS_NAME", "TARGETS", "PRETRAINED", "PROXY"),
    *("PROXY_MODEL", "BASE", "METHODS", "SEEDS", "BASELINE", "PROXY_SEED", "RUN", "CORPUS"),
    *("MAX_BYTES", "VOCAB_SIZE", "TOKENIZER", "TASKS", "DATA_DIR", "JOBS_AT_ONCE", "BASE_STEPS"),
    *("PROXY_STEPS", "LONG_PROXY_STEPS", "MEMBER_STEPS", "REGMIX_MEMBERS", "TP", "PP", "NPROC"),
)
COLUMNS_FOR_TARGETS = (
    "uniform natural chameleon chameleon-target-pretrain chameleon-target-finetune mixmin"
)
HINT = "or delete it, and run the same command again"
QUICKSTART_CORPUS = "runs/quickstart/1-corpus"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps and proxies of the small settings.

    Attributes:
        base: steps of the base models.
        proxy: steps of Chameleon's proxy; a third of these steps is too few.
        long_proxy: steps of the proxies of DoReMi and DoGE.
        member: steps of the proxies of RegMix, the surrogate and the mixing laws.
        regmix: number of proxies of RegMix and the surrogate.
        laws: number of proxies of the mixing laws.
        in_10_s: steps of these models in ten seconds.
    """

    base: int
    proxy: int
    long_proxy: int
    member: int
    regmix: int
    laws: int
    in_10_s: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One comparison: its columns, its folders, and the flags of its commands.

    Folders are text as the user has written it, since the run folder records it.

    Attributes:
        launchers: folder of the launchers, ``examples``.
        size: SIZE.
        experiment: EXPERIMENT, the name of an experiment of the paper; empty for small settings.
        run: folder of the experiment.
        corpus: folder of the corpus.
        methods: columns of the table.
        seeds: seeds of the base models.
        baseline: the column that perplexities are compared with.
        proxy_seed: seed of the proxies.
        proxy: run or checkpoint that embeds the domains.
        has_proxy: whether ``proxy`` is an existing model, which no job trains.
        at_once: number of concurrent jobs with one rank each; with 1, a job gets all ranks.
        ranks: flags of torchrun.
        train: flags of the base models.
        embed: flags of Chameleon's mixtures.
        evaluate: flags of the evaluation of perplexity.
        budget: training tokens of a base model.
        extra: flags of the user, for the base models.
        variant: VARIANT.
        pretrained: PRETRAINED.
        shared: run folder whose proxies and mixtures ``run`` uses; empty for none.
        recipe: launcher that makes the corpus of an experiment of the paper.
        tasks: whether downstream tasks are evaluated.
        target: domain that the corpus holds out as the target of all mixtures.
        targets: domains to hold out in turn, as the user has written them.
        proxy_flags: flags of the proxies of small settings.
        swarm: flags of the swarms of small settings.
        steps: steps of the small settings.
        expert_runs: folder of the models of single domains.
        hyperparameters: SETTINGS of an experiment of the paper.
        environment: environment variables of all jobs.
    """

    launchers: str
    size: str
    experiment: str
    run: str
    corpus: str
    methods: tuple[str, ...]
    seeds: tuple[str, ...]
    baseline: str
    proxy_seed: str
    proxy: str
    has_proxy: bool
    at_once: int
    ranks: Flags
    train: Flags
    embed: Flags
    evaluate: Flags
    budget: int
    extra: Flags
    variant: str = ""
    pretrained: str = ""
    shared: str = ""
    recipe: str = ""
    tasks: bool = False
    target: str = ""
    targets: str = ""
    proxy_flags: Flags = ()
    swarm: Flags = ()
    steps: Steps | None = None
    expert_runs: str = ""
    hyperparameters: str = "default"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def start(self) -> Flags:
        """Start of a job's command: one process, or all ranks."""
        return ("torchrun", *self.ranks) if self.at_once == 1 else ("python",)

    def mixture_file(self, name: str) -> Path:
        """File of a column's mixture."""
        return Path(self.run, "4-mixture", f"{name}.json")

    def embeds(self, name: str) -> bool:
        """Whether a column is a mixture of Chameleon's, which embeds the domains with ``proxy``.

        The user's own mixture may have such a name, too, so an existing mixture is judged by its
        method.
        """
        if not name.startswith("chameleon") or name in online_columns():
            return False
        path = self.mixture_file(name)
        return not path.exists() or Mixture.load(path).method.startswith("chameleon-")

    def initial_run(self, seed: str) -> str:
        """The run or checkpoint that training with a seed starts from; empty if from scratch."""
        is_comparison = self.pretrained and self.size == "small"
        return base_of_uniform(self.pretrained, seed) if is_comparison else self.pretrained


def flags(**values: object) -> Flags:
    """Return command-line flags: ``train_iters=5`` becomes ``--train-iters 5``."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return tuple(word for pair in pairs for word in pair)


def base_of_uniform(run: str, seed: str) -> str:
    """The base model of a comparison that was trained with uniform weights and this seed."""
    return f"{run}/5-base/uniform-seed{seed}"


def is_finished(run_dir: str) -> bool:
    """Whether a run has reached its last step."""
    path = Path(run_dir, "run.json")
    return path.exists() and read_json(path, HINT).get("status") == "finished"


def read_settings(env: Environment, launchers: str, ranks: Flags, extra: Flags) -> Settings:
    """Return the settings that the environment variables ``env`` choose.

    Args:
        env: environment variables; an empty value counts as unset.
        launchers: folder of the launchers, ``examples``.
        ranks: flags of torchrun.
        extra: flags of the user, for the base models.

    Raises:
        UserError: naming the variable that has an invalid value.
    """
    env = {name: value for name, value in env.items() if value}
    size, experiment, variant = env["SIZE"], env.get("EXPERIMENT", ""), env.get("VARIANT", "")
    is_fine_tuned = experiment in ("wiki40b", "stack")
    tasks = env.get("TASKS")
    for is_valid, problem in (
        (
            not variant or (variant, experiment) == ("2k", "slimpajama"),
            f"VARIANT={variant}: must be unset, or 2k with EXPERIMENT=slimpajama",
        ),
        (
            "PRETRAINED" not in env or size == "small" or is_fine_tuned,
            "PRETRAINED: requires SIZE=small, EXPERIMENT=wiki40b or EXPERIMENT=stack",
        ),
        (
            "TARGETS" not in env or not experiment,
            "TARGETS: requires SIZE=mini, small, gpu or tiny",
        ),
        ("PROXY" not in env or experiment == "pile", "PROXY: requires EXPERIMENT=pile"),
        (
            "BASE" not in env or not experiment,
            "BASE: requires SIZE=mini, small, gpu or tiny; the larger model is "
            "EXPERIMENT=slimpajama-1.2b",
        ),
        (
            "BASE_STEPS" not in env or not is_fine_tuned,
            f"BASE_STEPS: does not apply to EXPERIMENT={experiment}, whose steps the paper states",
        ),
        (
            tasks is None or (experiment and tasks in ("yes", "no")),
            f"TASKS={tasks}: must be unset, or yes or no with an EXPERIMENT",
        ),
        (
            not experiment or size in ("paper", "tiny"),
            f"SIZE={size}: must be paper or tiny with an EXPERIMENT",
        ),
        (
            experiment or size in SMALL_STEPS,
            f"SIZE={size}: must be mini, small, gpu, paper or tiny",
        ),
    ):
        if not is_valid:
            raise UserError(problem)
    make = papers_settings if experiment else small_settings
    return make(env, launchers, ranks, extra)


# The paper's experiments


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of the paper.

    Attributes:
        columns: columns of its table.
        kind: kind of hyperparameters, as in examples/hyperparameters.sh.
        recipe: launcher in examples/data that makes its corpus.
        tasks: whether its table has downstream tasks.
        base: size of its base models.
        baseline: the column that perplexities are compared with.
    """

    columns: str
    kind: str
    recipe: str
    tasks: bool
    base: str = "684m"
    baseline: str = "uniform"


FINE_TUNED = "uniform chameleon-finetune chameleon-pretrain"
SLIMPAJAMA = "slimpajama_627b.sh"
EXPERIMENTS = {
    "slimpajama": Experiment(
        "uniform doremi doge chameleon-pretrain regmix mixing-laws", "base", SLIMPAJAMA, True
    ),
    # The base models are larger; proxy and mixtures are those of slimpajama.
    "slimpajama-1.2b": Experiment(
        "uniform doremi doge chameleon-pretrain regmix", "base", SLIMPAJAMA, True, base="1.2b"
    ),
    # The domains are embedded with the proxy of slimpajama; DoGE trains its own.
    "pile": Experiment(
        "printed-human printed-doremi doge chameleon-pretrain printed-regmix",
        *("base-pile", "pile.sh", True),
        baseline="printed-human",
    ),
    # A model of pile is fine-tuned, and embeds the domains.
    "wiki40b": Experiment(FINE_TUNED, "finetune", "wiki40b.sh", False),
    "stack": Experiment(FINE_TUNED, "finetune", "stack.sh", False),
}
# The table of proxies of 2,000 steps, which has no tasks.
VARIANT_2K = Experiment("uniform chameleon-pretrain doremi-2k doge-2k", "base", SLIMPAJAMA, False)


def papers_settings(env: Environment, launchers: str, ranks: Flags, extra: Flags) -> Settings:
    """Return the settings of EXPERIMENT, at full size or as a smoke test; see read_settings."""
    name, is_tiny = env["EXPERIMENT"], env["SIZE"] == "tiny"
    if name not in EXPERIMENTS:
        raise UserError(
            f"EXPERIMENT={name}: must be slimpajama, slimpajama-1.2b, pile, wiki40b or stack"
        )
    chosen = VARIANT_2K if env.get("VARIANT") else EXPERIMENTS[name]
    runs, proxy, base = ("runs/tiny", "tiny", "tiny") if is_tiny else ("runs", "82m", chosen.base)
    run = env.get("RUN", f"{runs}/{name}")
    shared = f"{runs}/slimpajama" if name == "slimpajama-1.2b" else ""
    corpus = env.get("CORPUS", QUICKSTART_CORPUS if is_tiny else f"{shared or run}/1-corpus")
    pretrained, proxy_seed, has_proxy = "", env.get("PROXY_SEED", "1"), True
    if name == "pile":
        proxy = env.get("PROXY", f"{runs}/slimpajama/2-proxy/{proxy}-seed1")
    elif chosen.kind == "finetune":
        pretrained = env.get("PRETRAINED", f"{runs}/pile/5-base/chameleon-pretrain-seed1")
        proxy = pretrained
    else:
        proxy, has_proxy = f"{run}/2-proxy/{proxy}-seed{proxy_seed}", False
    # A smoke test has no access to the tasks' datasets unless DATA_DIR has copies of them.
    tasks = chosen.tasks and not (is_tiny and "DATA_DIR" not in env)
    train, embed, evaluate, (budget,) = _hyperparameters(launchers, chosen.kind, base)
    if not Path(corpus, "corpus.json").exists():
        raise UserError(f"no corpus at {corpus}; {corpus_hint(launchers, corpus, chosen, is_tiny)}")
    if shutil.which("torchrun") is None:
        raise UserError(
            "torchrun is not on the PATH: run 'make setup' and 'source .venv/bin/activate'"
        )
    if pretrained and not Path(pretrained).is_dir():
        raise UserError(
            f"no run at {pretrained}; create it with 'EXPERIMENT=pile bash "
            f"{launchers}/compare_methods.sh', or set PRETRAINED"
        )
    shared_flags = flags(
        tensor_model_parallel_size=env.get("TP", "1"),
        pipeline_model_parallel_size=env.get("PP", "1"),
        corpus=corpus,
    )
    return Settings(
        launchers=launchers,
        size=env["SIZE"],
        experiment=name,
        variant=env.get("VARIANT", ""),
        run=run,
        corpus=corpus,
        methods=tuple(env.get("METHODS", chosen.columns).split()),
        seeds=tuple(env.get("SEEDS", "1 2 3").split()),
        baseline=env.get("BASELINE", chosen.baseline),
        proxy_seed=proxy_seed,
        proxy=proxy,
        has_proxy=has_proxy,
        at_once=whole_number(env, "JOBS_AT_ONCE", 2 if is_tiny else 1),
        ranks=ranks,
        train=(*train, *shared_flags, *flags(seed=env.get("SEED", "1")), *extra),
        embed=(*embed, *shared_flags),
        evaluate=(*evaluate, *shared_flags),
        budget=int(budget),
        extra=extra,
        pretrained=pretrained,
        shared=shared,
        recipe=chosen.recipe,
        hyperparameters=env.get("SETTINGS", "default"),
        tasks=env.get("TASKS", "yes" if tasks else "no") == "yes",
    )


def _hyperparameters(launchers: str, kind: str, model: str) -> list[Flags]:
    """Return TRAIN, EMBED, EVALUATE and BUDGET of examples/hyperparameters.sh.

    The launchers of single runs source this file, too.
    """
    script = """
        LAUNCHER=compare_methods
        refuse() { echo "error: $*" >&2; exit 2; }
        source "$0/hyperparameters.sh"
        hyperparameters "$1" "$2"
        for flags in TRAIN EMBED EVALUATE BUDGET; do
          declare -n values=$flags
          printf '%s\\0' "${values[@]}" ''
        done
    """
    command = ["bash", "-euc", script, launchers, kind, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return [tuple(words.split("\0")) for words in done.stdout.split("\0\0")[:-1]]


def whole_number(env: Environment, name: str, default: int) -> int:
    """The environment variable ``name``, which must be at least 1.

    Raises:
        UserError: if it is not such a number.
    """
    value = env.get(name, f"{default}")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{name}={value}: must be a whole number of at least 1")
    return int(value)


def corpus_hint(launchers: str, corpus: str, experiment: Experiment | None, is_tiny: bool) -> str:
    """Tell how to create a corpus that does not exist."""
    if is_tiny:
        return "create a small one with 'make quickstart', or set CORPUS"
    recipe = experiment.recipe if experiment else "installed_text.sh"
    return f"create it with 'OUTPUT={corpus} bash {launchers}/data/{recipe}', or set CORPUS"


# The small settings, whose models train on CPUs, or on one GPU

# A CPU core makes about 62 steps in ten seconds; with the 4,096 entries of small, 110.
SMALL_STEPS = {
    "mini": Steps(
        base=800, proxy=1000, long_proxy=1500, member=150, regmix=48, laws=24, in_10_s=62
    ),
    # 2 million tokens per base model, and the validation losses from which the table computes
    # tokens for the same loss. After 150 steps, members predict worse than token frequencies.
    "small": Steps(
        base=2000, proxy=1000, long_proxy=1500, member=400, regmix=32, laws=24, in_10_s=110
    ),
    # The text of small and models of 30 million parameters, trained on 39 million tokens on one
    # GPU, which trains two of them at a time.
    "gpu": Steps(
        base=1200, proxy=1200, long_proxy=1200, member=400, regmix=32, laws=24, in_10_s=150
    ),
    # A smoke test, in which models learn nothing.
    "tiny": Steps(base=12, proxy=8, long_proxy=12, member=4, regmix=16, laws=12, in_10_s=62),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hyperparameters of small models, and the samples of embeddings and evaluations."""

    seq_length: int = 128
    batch: int = 8
    warmup: int = 160
    swarm_warmup: int = 40
    lr: str = "4e-3"
    min_lr: str = "1e-3"
    swarm_lr: str = "1e-2"
    precision: Flags = ()
    embed: Flags = ("--num-windows", "512")  # as in the quickstart
    max_tokens: int = 25000
    eval_tokens: int = 4096


def small_settings(env: Environment, launchers: str, ranks: Flags, extra: Flags) -> Settings:
    """Return the settings of SIZE=mini, small, gpu and tiny; see read_settings."""
    size, pretrained, target = env["SIZE"], env.get("PRETRAINED", ""), env.get("TARGET", "")
    has_targets = bool(target or env.get("TARGETS"))
    corpus_name = env.get("CORPUS_NAME", "installed")
    seeds, steps, base = "1 2 3", SMALL_STEPS[size], "llama-30m" if size == "gpu" else "nano"
    run = {"mini": "runs/compare-mini", "tiny": "runs/tiny/compare_methods"}.get(
        size, f"runs/compare-{size}/{'finetune-' if pretrained else ''}{corpus_name}"
    )
    columns = "uniform natural unimax chameleon doremi doge regmix surrogate mixing-laws"
    environment = {}
    if size != "gpu":
        environment = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    if size in ("small", "gpu"):
        if not Path(launchers, "data", f"{corpus_name}_text.sh").exists():
            raise UserError(f"CORPUS_NAME={corpus_name}: must be installed, registers or code")
        columns = "uniform natural chameleon doremi surrogate odm"
        # Domains keep their own sizes up to 20 MB; with 4,096 entries, a step takes 0.6 times as
        # long as with 8,192.
        environment["MAX_BYTES"] = env.get("MAX_BYTES", "20000000")
        environment["VOCAB_SIZE"] = env.get("VOCAB_SIZE", "4096")
    if has_targets:
        columns = COLUMNS_FOR_TARGETS
    if size == "small":
        steps = dataclasses.replace(
            steps, base=600 if has_targets else 1000 if pretrained else steps.base
        )
        seeds = "1 2 3" if has_targets else "1 2 3 4 5"
    if pretrained:
        columns = "uniform chameleon-target-finetune mixmin" if has_targets else FINE_TUNED
        environment["TOKENIZER"] = env.get("TOKENIZER", f"{pretrained}/tokenizer.json")
    steps = Steps(
        base=whole_number(env, "BASE_STEPS", steps.base),
        proxy=whole_number(env, "PROXY_STEPS", steps.proxy),
        long_proxy=whole_number(env, "LONG_PROXY_STEPS", steps.long_proxy),
        member=whole_number(env, "MEMBER_STEPS", steps.member),
        regmix=whole_number(env, "REGMIX_MEMBERS", steps.regmix),
        laws=steps.laws,
        in_10_s=whole_number(env, "STEPS_IN_10_S", steps.in_10_s),
    )
    recipe = Recipe()
    if size == "gpu":
        recipe = Recipe(
            *(512, 64, steps.base // 10, steps.member // 10, "2e-3", "2e-4", "2e-3", ("--bf16",)),
            embed=("--num-windows", "1024"),
            max_tokens=100000,
            eval_tokens=65536,
        )
    elif size == "tiny":
        recipe = Recipe(
            seq_length=64,
            warmup=2,
            swarm_warmup=1,
            embed=("--num-windows", "32", "--bootstrap-resamples", "50"),
            max_tokens=1024,
            eval_tokens=512,
        )
    run, seeds = env.get("RUN", run), env.get("SEEDS", seeds)
    corpus = env.get("CORPUS", QUICKSTART_CORPUS if size == "tiny" else f"{run}/1-corpus")
    base, proxy_model = env.get("BASE", base), env.get("PROXY_MODEL", base)
    proxy_seed = env.get("PROXY_SEED", "1")
    proxy = f"{run}/2-proxy/{proxy_model}-seed{proxy_seed}"
    if pretrained:
        if "CORPUS" not in env and not Path(environment["TOKENIZER"]).exists():
            raise UserError(
                f"no {environment['TOKENIZER']}; set CORPUS, TOKENIZER, or another PRETRAINED"
            )
        for seed in (*seeds.split(), proxy_seed):
            if not is_finished(base_of_uniform(pretrained, seed)):
                raise UserError(
                    f"PRETRAINED={pretrained}: must be the RUN of a comparison with SIZE=small and "
                    f"seed {seed}"
                )
        proxy = base_of_uniform(pretrained, proxy_seed)
    batches = flags(seq_length=recipe.seq_length, global_batch_size=recipe.batch)
    batches += recipe.precision
    # These settings were chosen for small differences between seeds. At a learning rate of 1e-2,
    # one model in twenty lagged far behind. With half the warm-up and beta2 0.95, the mean losses
    # of seeds differed by up to 0.3; with these settings, they differ by 0.07.
    run_flags = batches + flags(
        micro_batch_size=recipe.batch,
        lr_warmup_iters=recipe.warmup,
        lr=recipe.lr,
        min_lr=recipe.min_lr,
        adam_beta2=0.99,
        log_interval=50,
        save_interval=200,
    )
    train = (*flags(model=base), *run_flags, *flags(train_iters=steps.base, corpus=corpus))
    if size in ("small", "gpu"):  # online methods need the permutation
        train += flags(
            permutation="epoch", eval_interval=steps.base // 10, eval_tokens=recipe.eval_tokens
        )
    swarm = (*flags(model=proxy_model), *batches)
    swarm += flags(
        lr_warmup_iters=recipe.swarm_warmup,
        lr=recipe.swarm_lr,
        seed=proxy_seed,
        train_iters=steps.member,
        eval_tokens=recipe.eval_tokens,
    )
    return Settings(
        launchers=launchers,
        size=size,
        experiment="",
        run=run,
        corpus=corpus,
        methods=tuple(env.get("METHODS", columns).split()),
        seeds=tuple(seeds.split()),
        baseline=env.get("BASELINE", "uniform"),
        proxy_seed=proxy_seed,
        proxy=proxy,
        has_proxy=bool(pretrained),
        # Two jobs are 1.8 times as fast as one job at a time with two ranks.
        at_once=whole_number(env, "JOBS_AT_ONCE", 2),
        ranks=ranks,
        train=(*train, *extra),
        embed=recipe.embed + flags(corpus=corpus),
        evaluate=flags(max_tokens=recipe.max_tokens, corpus=corpus),
        budget=steps.base * recipe.seq_length * recipe.batch,
        extra=extra,
        pretrained=pretrained,
        target=target,
        targets=env.get("TARGETS", ""),
        proxy_flags=(*flags(model=proxy_model), *run_flags, *flags(seed=proxy_seed)),
        swarm=swarm,
        steps=steps,
        expert_runs=env.get("EXPERT_RUNS", f"{run}/2-proxy/experts"),
        environment=environment,
    )


def require_valid(settings: Settings) -> None:
    """Raise UserError for seeds and columns that cannot be compared with these settings."""
    for name in (*settings.seeds, settings.proxy_seed):
        if not re.fullmatch("0|[1-9][0-9]*", name):
            raise UserError(f"SEEDS and PROXY_SEED: {name} is not an integer")
    require_choice(
        comparison_options(settings, check="choice"), {*find_methods(), *online_columns()}
    )
    for name in settings.methods:
        if name in online_columns() and "--permutation" not in settings.train:
            raise UserError(
                f"METHODS: {name} requires SIZE=small or gpu, or -- --permutation epoch"
            )
        if name.startswith("printed-") and not settings.experiment:
            raise UserError(f"METHODS: {name} requires EXPERIMENT")
        is_computed = settings.embeds(name) and not settings.mixture_file(name).exists()
        if is_computed and settings.experiment == "pile" and not Path(settings.proxy).is_dir():
            raise UserError(
                f"no run at {settings.proxy}; create it with 'EXPERIMENT=slimpajama bash "
                f"{settings.launchers}/compare_methods.sh', or set PROXY"
            )


def comparison_options(settings: Settings, check: Check, *names: str) -> CompareMethodsOptions:
    """Return the options of compare_methods for ``names``; default: all columns."""
    return CompareMethodsOptions(
        run=Path(settings.run),
        mixtures=names or settings.methods,
        seeds=tuple(map(int, settings.seeds)),
        baseline=settings.baseline,
        check=check,
    )
