"""Downstream tasks as losses: swarms whose members are evaluated on tasks."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.artifacts.swarm import MemberRecord, member_path
from megatron_chameleon.artifacts.training_run import TrainingRun
from megatron_chameleon.corpus.options import EncoderOptions, PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import TaskOptions
from megatron_chameleon.evaluation.tasks import FOLDERS
from megatron_chameleon.interchange.mixture_runs import read_mixture_runs
from megatron_chameleon.methods.mixing_laws import METHOD, LawOptions, MixingLawsOptions
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.swarm import MixtureSamplingOptions
from tests.fixtures.task_data import Words, write_task_data
from tests.unit.methods.swarm.small_swarm import SWARM

MEMBERS = 4


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Mixing laws of a swarm on two domains of text, evaluated on two tasks."""
    root = tmp_path_factory.mktemp("tasks")
    paths = []
    for name in ("stories", "letters"):
        documents = [{"text": Words(f"{name} {number}").text(8)} for number in range(60)]
        paths.append(f"{name}={root / name}.jsonl")
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    tokenizer = root / "tokenizer.json"
    tokenizer.write_bytes(byte_level_bpe(iter([Words("tokenizer").text(200)]), 400, "<|eod|>"))
    preprocess_data(
        PreprocessOptions(
            SourceOptions((tuple(paths),)),
            root / "corpus",
            tokenizer,
            encoding=EncoderOptions(encoder="own"),
            eod_token="<|eod|>",
            split="60,30,10",
            workers=1,
        )
    )
    swarm = dataclasses.replace(
        SWARM,
        train_iters=3,
        seq_length=128,
        eval_tokens=256,
        downstream=TaskOptions(
            tasks=("lambada_openai", "sciq"), limit=2, data_dir=write_task_data(root / "data", 4)
        ),
    )
    return MixingLawsOptions(
        corpus=root / "corpus",
        output=root / "mixture.json",
        num_proxies=MEMBERS,
        sampling=MixtureSamplingOptions(smallest_weight=0.05),
        swarm=swarm,
        laws=LawOptions(num_starts=2),
        target="sciq=2,stories=1",
        fallback=PriorOptions(accept_uncertain=True),
    )


def test_a_mixture_is_fitted_to_tasks_and_domains(options):
    """Also another target from the same swarm: the mean over tasks, if there is no --target."""
    assert not METHOD.compute(options)
    mixture = Mixture.load(options.output)
    assert mixture.parameters["target_shares"] == pytest.approx(
        {"stories": 1 / 3, "letters": 0, "lambada_openai": 0, "sciq": 2 / 3}
    )
    swarm = options.runs_folder / "swarm-nano"
    read = read_mixture_runs(swarm / "ratios.csv", swarm / "metrics.csv")
    assert read.metrics == ["stories", "letters", "lambada_openai", "sciq"]
    assert np.ptp(read.losses, axis=0).min() > 0
    for member, losses in enumerate(read.losses):
        folder = member_path(swarm, member).with_suffix("")
        result = DownstreamResult.load(folder / "downstream.json")
        scores = [result.tasks[task].by_shots[0].bits_per_byte for task in read.metrics[2:]]
        assert scores == list(losses[2:])
        cost = TrainingRun.load(folder).cost + result.cost
        assert MemberRecord.load(member_path(swarm, member)).cost.flops == cost.flops
    shutil.rmtree(options.swarm.downstream.data_dir)  # finished members are not evaluated again
    again = dataclasses.replace(options, output=options.output.with_name("again.json"), target=None)
    assert not METHOD.compute(dataclasses.replace(again, work_dir=options.runs_folder))
    shares = Mixture.load(again.output).parameters["target_shares"]
    assert shares == {"stories": 0, "letters": 0, "lambada_openai": 0.5, "sciq": 0.5}
    existing = type(options)(corpus=options.corpus, output=again.output, swarm_dir=swarm)
    with pytest.warns(MixtureWarning):
        assert not METHOD.compute(existing)
    assert Mixture.load(again.output).parameters["target_shares"] == shares


def with_tasks(options, output, **changes):
    """Change the tasks; the mean over them is the target, and nothing exists yet."""
    downstream = dataclasses.replace(options.swarm.downstream, **changes)
    swarm = dataclasses.replace(options.swarm, downstream=downstream)
    return dataclasses.replace(options, swarm=swarm, target=None, output=output / "mixture.json")


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("sciq", "sciq does not exist"),
        ("gsm8k", "generate_until"),
        ("piqa", "question 1 .* has no gold answer"),
        pytest.param("songs", "unknown", marks=pytest.mark.slow),  # reads all tasks of lm-eval
    ],
)
def test_tasks_are_checked_before_training(options, tmp_path, monkeypatch, task, problem):
    monkeypatch.setitem(FOLDERS, "gsm8k", "gsm8k")
    for name, documents in (
        ("openai/gsm8k", [{"question": "1 + 1?", "answer": "2"}]),
        ("baber/piqa", [{"goal": "a", "sol1": "b", "sol2": "c", "label": n} for n in (1, -1)]),
    ):
        data = tmp_path / "data" / name
        data.mkdir(parents=True)
        (data / "README.md").write_text("---\nconfigs:\n- config_name: main\n---\n")
        for split in ("train", "validation", "test"):
            (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    changed = with_tasks(options, tmp_path / "out", tasks=(task,), data_dir=tmp_path / "data")
    with pytest.raises(UserError, match=f"--tasks {task}: .*{problem}") as error:
        METHOD.compute(changed)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_options_that_exclude_tasks_are_rejected(options, tmp_path):
    laws = LawOptions(models=("nano", "regmix-1m", "tiny"), target_model="mini")
    for make in (
        lambda: TaskOptions(shots=(0, 5)),
        lambda: dataclasses.replace(options, laws=laws),
        lambda: METHOD.compute(dataclasses.replace(options, target="piqa")),
        lambda: METHOD.compute(with_tasks(options, tmp_path, tasks=("letters",))),
    ):
        with pytest.raises(UserError, match=r"--tasks|piqa"):
            make()
    assert not list(tmp_path.iterdir())
