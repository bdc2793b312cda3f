"""What the launchers of examples/ that weigh domains, and train nothing, start and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.methods.chameleon import ChameleonOptions
from tests.unit.launched import WEIGHING, Launcher, write_everything

FROM_A_BASE_MODEL = ["mixture_stack", "mixture_wiki40b"]


@pytest.fixture
def launch(tmp_path):
    return Launcher(tmp_path)


@pytest.fixture
def everything(tmp_path):
    write_everything(tmp_path)


def test_the_proxy_of_slimpajama_weighs_the_pile(launch, everything):
    (call,) = launch("transfer_pile").calls
    options = call.options
    assert isinstance(options, ChameleonOptions)
    assert (call.program, options.mode) == ("torchrun", "pretrain")
    assert options.corpus == Path("runs/pile/1-corpus")
    assert options.checkpoint == Path("runs/slimpajama/2-proxy/82m-seed1")
    assert options.output == Path("runs/pile/4-mixture/chameleon-pretrain.json")
    (training,) = launch("pretrain_684m_pile").training()
    assert training.mixture == str(options.output)


@pytest.mark.parametrize("name", FROM_A_BASE_MODEL)
def test_a_base_model_weighs_what_it_will_be_tuned_on(launch, everything, name):
    first, second = launch(name).calls
    run = Path("runs") / name.removeprefix("mixture_")
    assert (first.program, second.program) == ("torchrun", "python")
    assert [call.options.mode for call in (first, second)] == ["finetune", "pretrain"]
    for call in (first, second):
        options = call.options
        assert options.checkpoint == Path("runs/pile/5-base/chameleon-pretrain-seed1")
        assert (options.corpus, options.store) == (run / "1-corpus", run / "3-embeddings")
        assert options.output == run / f"4-mixture/chameleon-{options.mode}.json"


@pytest.mark.parametrize("name", WEIGHING)
def test_every_window_of_the_paper_is_embedded(launch, everything, name):
    for call in launch(name).calls:
        assert call.options.extraction.num_windows == 4096
        assert call.options.weighting.recipe == "reference"


@pytest.mark.parametrize("name", WEIGHING)
def test_the_environment_and_flags_choose(launch, everything, name, tmp_path):
    (tmp_path / "model").mkdir()
    choices = {"TP": "2", "NPROC": "4", "RUN": "my run", "CORPUS": "runs/stack/1-corpus"}
    choices |= {"PROXY": "model", "PRETRAINED": "model"}
    calls = launch(name, "--", "--ridge", "3", "--num-windows", "99", **choices).calls
    assert calls[0].ranks.nproc_per_node == "4"
    assert calls[0].options.parallel.tensor_model_parallel_size == 2
    for call in calls:
        options = call.options
        assert (options.weighting.ridge, options.extraction.num_windows) == (3.0, 99)
        assert (options.checkpoint, options.corpus) == (Path("model"), Path("runs/stack/1-corpus"))
        assert options.output.parent == Path("my run/4-mixture")


@pytest.mark.parametrize("name", WEIGHING)
def test_what_is_tried_out_needs_two_ranks_and_few_windows(launch, everything, name):
    first, *_ = launch(name, SIZE="tiny").calls
    assert (first.ranks.nproc_per_node, first.options.extraction.num_windows) == ("2", 64)
    assert first.options.corpus == Path("runs/quickstart/1-corpus")
    assert first.options.output.parts[:3] == ("runs", "tiny", name)
    assert first.options.checkpoint.parts[:2] == ("runs", "tiny")


@pytest.mark.parametrize(
    ("name", "choices", "told"),
    [
        ("transfer_pile", {"PROXY": "lost"}, "there is no run lost to embed with: SIZE=82m bash"),
        ("mixture_stack", {"PRETRAINED": "lost"}, "there is no run lost to start from: "),
        ("mixture_wiki40b", {"CORPUS": "lost"}, "there is no corpus in lost: OUTPUT=lost bash"),
    ],
)
def test_what_is_missing_is_told_in_a_line(launch, everything, name, choices, told):
    refused = launch(name, **choices)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("name", WEIGHING)
def test_help_names_the_choices(launch, name):
    helped = launch(name, "--help")
    assert (helped.status, helped.calls, helped.errors) == (0, [], "")
    for word in ("SIZE", "RUN", "CORPUS", "TP, PP", "NPROC"):
        assert f"\n  {word} " in helped.said
    assert "section" in helped.said
