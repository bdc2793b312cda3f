"""What the launchers of examples/baselines start and refuse: a mixture by each method.

All but the last tests hold for every launcher there, whatever its method.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_chameleon.methods.common.registry import DEFAULT_METHOD, find_methods
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.options.mixture import MethodOptions
from tests.unit.launched import EXAMPLES, Call, Launched, Launcher, write_everything

BASELINES = sorted(path.stem for path in (EXAMPLES / "baselines").glob("*.sh"))
MODEL_FREE = ["manual", "natural", "uniform", "unimax"]
OPENS = re.compile(r"^ *[A-Z_]+\+?=\($")
MARKED = re.compile(r"^ +--[a-z0-9-]+(?: [^#]+?)? +# (?:paper|assumed|tiny): \S")
OTHERS = ("PUBLISHED",)  # choices that only one launcher has


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """``launch(name, *arguments, **choices)`` of a launcher of examples/baselines."""
    for choice in OTHERS:
        monkeypatch.delenv(choice, raising=False)
    launcher = Launcher(tmp_path)
    return lambda name, *rest, **choices: launcher(f"baselines/{name}", *rest, **choices)


@pytest.fixture
def everything(tmp_path):
    write_everything(tmp_path)
    return tmp_path


def weighing(launched: Launched) -> list[Call]:
    """The calls of tools/compute_mixture.py, of which there is at least one."""
    assert launched.status == 0, launched.errors
    calls = [call for call in launched.calls if isinstance(call.options, MethodOptions)]
    assert calls
    return calls


def array_lines(name: str) -> list[str]:
    """The lines within the arrays of flags."""
    found, inside = [], False
    for line in (EXAMPLES / f"baselines/{name}.sh").read_text().splitlines():
        if inside and line.strip() == ")":
            inside = False
        elif inside:
            found.append(line)
        else:
            inside = bool(OPENS.match(line))
    return found


def test_every_method_but_our_own_has_a_launcher():
    assert {name.replace("_", "-") for name in BASELINES} == set(find_methods()) - {DEFAULT_METHOD}


@pytest.mark.parametrize("name", BASELINES)
def test_it_finds_a_mixture_by_its_method(launch, everything, name):
    *_, last = weighing(launch(name))
    assert type(last.options) is find_methods()[name.replace("_", "-")].options
    assert last.options.corpus == Path("runs/slimpajama/1-corpus")
    assert last.options.output.parent == Path("runs/slimpajama/4-mixture")
    assert last.options.output.suffix == ".json"


@pytest.mark.parametrize("name", BASELINES)
def test_every_flag_of_its_own_is_marked_as_the_papers_or_assumed(name):
    lines = array_lines(name)
    assert lines
    assert [line for line in lines if not MARKED.match(line)] == []


@pytest.mark.parametrize("name", BASELINES)
def test_the_environment_and_flags_choose(launch, everything, name):
    choices = {"RUN": "my run", "CORPUS": "runs/stack/1-corpus", "NPROC": "3"}
    calls = weighing(launch(name, "--", "--token-budget", "77", **choices))
    for call in calls:
        assert call.options.corpus == Path("runs/stack/1-corpus")
        assert call.options.output.parent == Path("my run/4-mixture")
        assert call.options.token_budget == 77
        assert call.ranks is None or call.ranks.nproc_per_node == "3"


@pytest.mark.parametrize("name", BASELINES)
def test_what_is_tried_out_is_tiny_and_on_two_ranks(launch, everything, name):
    calls = weighing(launch(name, SIZE="tiny"))
    for call in calls:
        assert call.ranks is None or call.ranks.nproc_per_node == "2"
        assert call.options.corpus == Path("runs/quickstart/1-corpus")
        assert call.options.output.parts[:3] == ("runs", "tiny", name)


@pytest.mark.parametrize("name", BASELINES)
def test_other_nodes_write_nothing_on_their_own(launch, everything, name):
    launched = launch(name, NNODES="2", NODE_RANK="1", MASTER_ADDR="first")
    assert launched.status == 0, launched.errors
    assert {call.program for call in launched.calls} <= {"torchrun"}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(
    ("arguments", "choices", "told"),
    [
        ((), {"CORPUS": "lost"}, "there is no corpus in lost: OUTPUT=lost bash"),
        ((), {"SIZE": "huge"}, "SIZE=huge: no such size; choose from 60m, 82m"),
        (("--seed", "3"), {}, "--seed: choices are environment variables"),
    ],
)
def test_a_mistake_is_told_in_a_line(launch, everything, name, arguments, choices, told):
    refused = launch(name, *arguments, **choices)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("name", BASELINES)
def test_help_names_the_choices(launch, name):
    helped = launch(name, "--help")
    assert (helped.status, helped.calls, helped.errors) == (0, [], "")
    for word in ("SIZE", "RUN", "CORPUS", "TP, PP", "NPROC"):
        assert f"\n  {word} " in helped.said, word
    assert "set -euo" not in helped.said
    told = re.findall(r"examples/(baselines/\w+\.sh)", helped.said)
    assert f"baselines/{name}.sh" in told
    assert all((EXAMPLES / path).is_file() for path in told)


@pytest.mark.parametrize("name", MODEL_FREE)
def test_what_trains_nothing_starts_no_ranks(launch, everything, name):
    launched = launch(name)
    assert {call.program for call in launched.calls} == {"python"}


@pytest.mark.parametrize("name", MODEL_FREE)
@pytest.mark.parametrize("size", ["684m", "tiny"])
def test_epochs_are_those_of_the_base_model_that_follows(launch, everything, tmp_path, name, size):
    """The budget is not told twice: it is what the launcher of the base model trains on."""
    *_, call = weighing(launch(name, SIZE=size))
    write_everything(tmp_path / "base")
    launch_base = Launcher(tmp_path / "base")
    (base,) = launch_base("pretrain_684m", SIZE=size, MIXTURE="uniform").training()
    tokens = base.train_iters * base.global_batch_size * base.seq_length
    assert call.options.token_budget == tokens


@pytest.mark.parametrize(("size", "target"), [("684m", "cc"), ("tiny", None)])
def test_regmix_is_towards_the_papers_target(launch, everything, size, target):
    """A tiny corpus has no domain of that name."""
    *_, call = weighing(launch("regmix", SIZE=size))
    assert call.options.target == target
    *_, call = weighing(launch("regmix", "--", "--target", "c4", SIZE=size))
    assert call.options.target == "c4"


def test_the_papers_columns_are_a_mixture_each(launch, everything):
    calls = weighing(launch("manual"))
    columns = ["doremi", "doge", "chameleon", "regmix"]
    assert [call.options.published for call in calls] == [f"slimpajama/{c}" for c in columns]
    assert [call.options.output.stem for call in calls] == [f"printed-{c}" for c in columns]


@pytest.mark.parametrize(
    ("column", "base"),
    [
        ("pile/human", "pretrain_684m_pile"),
        ("wiki40b/chameleon-finetune", "finetune_wiki40b"),
        ("stack/chameleon-finetune", "finetune_stack"),
    ],
)
def test_columns_of_another_data_set_go_with_its_corpus_and_its_base_model(
    launch, everything, tmp_path, column, base
):
    data_set, _, name = column.partition("/")
    calls = weighing(launch("manual", PUBLISHED=column))
    (options,) = (call.options for call in calls)
    assert isinstance(options, ManualOptions)
    assert (options.published, options.corpus) == (column, Path(f"runs/{data_set}/1-corpus"))
    assert options.output == Path(f"runs/{data_set}/4-mixture/printed-{name}.json")
    write_everything(tmp_path / "base")
    (run,) = Launcher(tmp_path / "base")(base, MIXTURE="uniform").training()
    assert options.token_budget == run.train_iters * run.global_batch_size * run.seq_length


def test_another_folder_can_be_chosen(launch, everything):
    (call,) = weighing(launch("manual", PUBLISHED="pile/human", RUN="runs/slimpajama"))
    assert call.options.output == Path("runs/slimpajama/4-mixture/printed-human.json")


@pytest.mark.parametrize(
    ("published", "told"),
    [
        ("pile/human", "there is no corpus in runs/pile/1-corpus: OUTPUT=runs/pile/1-corpus bash"),
        ("pile/human", "/data/pile.sh makes it"),
        ("wiki40b/chameleon-finetune", "/data/wiki40b.sh makes it"),
        ("slimpajama/doge", "/data/slimpajama_627b.sh makes it"),
        ("doge", "PUBLISHED=doge: the data sets are slimpajama/, pile/, wiki40b/ and stack/"),
        ("pile/human slimpajama/doge", "slimpajama/doge is no column of pile/"),
    ],
)
def test_columns_without_their_corpus_are_told_in_a_line(launch, published, told):
    refused = launch("manual", PUBLISHED=published)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert told in line
