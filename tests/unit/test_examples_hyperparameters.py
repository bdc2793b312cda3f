"""The one file of hyper-parameters: each is marked, and agrees with the defaults of the options."""

from __future__ import annotations

import inspect
import re

from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.model.sizes import DEFAULT_SIZE, SIZES
from megatron_chameleon.options.training import OptimizerOptions, PretrainOptions
from tests.unit.launched import EXAMPLES, LAUNCHERS, Launcher, write_everything

# One line of examples/hyperparameters.sh: flag, value or values, mark.
LINE = re.compile(r"^ +(--[a-z0-9-]+)(?: ([^#]+?))? +# (paper|assumed|tiny): \S")


def marked_lines() -> list[tuple[str, str | None, str]]:
    """Flag, value and mark of every line of the file that has a flag."""
    lines = (EXAMPLES / "hyperparameters.sh").read_text().splitlines()
    flags = [line for line in lines if line.lstrip().startswith("--")]
    found = [(line, LINE.match(line)) for line in flags if "--model-size" not in line]
    assert [line for line, match in found if match is None] == []
    return [(match[1], match[2], match[3]) for _, match in found if match]


def test_every_hyperparameter_is_marked_as_the_papers_or_assumed():
    marks = marked_lines()
    assert len(marks) > 30
    assert {mark for _, _, mark in marks} == {"paper", "assumed", "tiny"}
    flags = (EXAMPLES / "launch.sh").read_text() + "".join(
        (EXAMPLES / f"{name}.sh").read_text() for name in LAUNCHERS
    )
    code = "\n".join(line for line in flags.splitlines() if not line.startswith("#"))
    for flag, _, _ in marks:
        assert f"{flag} " not in code, f"{flag} belongs into hyperparameters.sh"


def test_what_they_and_the_options_have_in_common_agrees(tmp_path):
    """The defaults of PretrainOptions are those of the 82M proxy."""
    write_everything(tmp_path)
    (options,) = Launcher(tmp_path)("pretrain_82m_proxy").training()
    default = PretrainOptions(run_dir=options.run_dir)
    assert options.optimizer == OptimizerOptions()
    assert options.model_size == DEFAULT_SIZE
    for field in ("seq_length", "train_iters", "global_batch_size"):
        assert getattr(options, field) == getattr(default, field), field
    assert options.micro_batch_size == default.micro_batch_size


def test_the_options_name_the_same_origin():
    """'(paper' and '(assumed' in the help of an option, and the mark of its lines."""
    helped = " ".join(docstrings(PretrainOptions).values())
    assert "(paper" in helped
    assert "(assumed" in helped
    for cls in (PretrainOptions, OptimizerOptions, ChameleonOptions):
        for name, text in docstrings(cls).items():
            marks = {mark for flag, _, mark in marked_lines() if flag == f"--{name}"} - {"tiny"}
            if "(paper" in text:
                assert not marks or "paper" in marks, name
            if "(assumed" in text:
                assert marks <= {"assumed"}, name


def docstrings(options: type) -> dict[str, str]:
    """Flag name -> the text under the field in the source of the options."""
    source = inspect.getsource(inspect.getmodule(options))  # type: ignore[arg-type]
    found = re.findall(r'^    (\w+):[^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return {name.replace("_", "-"): " ".join(text.split()) for name, text in found}


def test_the_sizes_are_those_there_are():
    text = (EXAMPLES / "hyperparameters.sh").read_text()
    told = re.search(r"no such size; choose from ([^\"]+)\"", text)
    assert told is not None
    assert set(told[1].split(", ")) == {*SIZES} - {"nano", "mini", "1m"}
