"""What examples/compare_methods.sh refuses before it makes anything, and what it takes."""

from __future__ import annotations

import shutil

import pytest

from megatron_chameleon.options.mixture import MethodOptions
from tests.unit.compared import CORPUS, NAME, Workers, small
from tests.unit.launched import EXAMPLES, write_everything


@pytest.fixture
def launch(tmp_path):
    write_everything(tmp_path)
    return Workers(tmp_path)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"SIZE": "huge"}, "SIZE=huge: choose from mini, paper, tiny"),
        ({"VARIANT": "5k"}, "VARIANT=5k: there is 2k, or none"),
        ({"SIZE": "paper", "CORPUS": "lost"}, "there is no corpus in lost: OUTPUT=lost bash"),
        ({"SIZE": "tiny", "CORPUS": "lost"}, "there is no corpus in lost: make quickstart leaves"),
        ({"SIZE": "paper", "BASE": "2b"}, "SIZE=2b: no such size"),
    ],
)
def test_a_mistake_is_told_in_a_line(launch, choices, told):
    refused = launch(NAME, **{"CORPUS": CORPUS, **choices})
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("size", ["mini", "paper"])
@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"SEEDS": "1 2"}, "--seeds 1 2: "),
        ({"SEEDS": "1 1 2"}, "--seeds 1 1 2: "),
        ({"SEEDS": "1 2 x"}, "SEEDS and PROXY_SEED: x is no whole number"),
        ({"SEEDS": "01 2 3"}, "SEEDS and PROXY_SEED: 01 is no whole number"),
        ({"METHODS": "uniform"}, "--mixtures uniform: "),
        ({"METHODS": "uniform doge doge"}, "--mixtures uniform doge doge: "),
        ({"METHODS": "doremi chameleon"}, "--baseline uniform is not among --mixtures doremi cham"),
        (
            {"BASELINE": "regmix"},
            "add it, or name another one (BASELINE=NAME of examples/compare_m",
        ),
        ({"METHODS": "uniform regmax"}, "--mixtures regmax: unknown method"),
        ({"METHODS": "uniform regmix-2k"}, "--mixtures regmix-2k: unknown method"),
    ],
)
def test_what_the_table_would_refuse_is_refused_before_anything_is_made(
    launch, tmp_path, size, choices, told
):
    common = {"SIZE": size, "CORPUS": CORPUS, "RUN": "run", "METHODS": "uniform doge"}
    refused = launch(NAME, **common | choices)
    assert (refused.status, refused.calls) == (2, [])
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert not (tmp_path / "run").exists()


def test_another_baseline_is_what_the_table_is_given(launch):
    launched = small(launch, METHODS="natural doremi", BASELINE="natural")
    assert launched.status == 0, launched.errors
    assert launched.calls[-1].options.baseline == "natural"


def test_a_mixture_that_is_there_needs_no_method(launch, tmp_path):
    path = tmp_path / "runs/compare-mini/4-mixture/mine.json"
    path.parent.mkdir(parents=True)
    path.write_text('  "weights": {\n    "a": 0.5\n  }\n')
    launched = small(launch, METHODS="uniform mine")
    assert launched.status == 0, launched.errors
    options = [call.options for call in launched.calls if isinstance(call.options, MethodOptions)]
    assert [one.output.stem for one in options] == ["uniform"]
    assert sum(run.run_dir.name.startswith("mine-seed") for run in launched.training()) == 3


def test_a_method_without_a_launcher_of_the_papers_setting_is_refused(launch, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(EXAMPLES, copy / "examples")
    (copy / "tools").symlink_to(EXAMPLES.parent / "tools")
    (copy / "examples/baselines/natural.sh").unlink()
    script = str(copy / f"examples/{NAME}")
    refused = launch(script, SIZE="paper", METHODS="uniform natural")
    assert (refused.status, refused.calls) == (2, [])
    assert "/baselines/natural.sh, which would make natural; put it to runs/" in refused.errors
    assert launch(script, SIZE="paper", METHODS="uniform unimax").status == 0
