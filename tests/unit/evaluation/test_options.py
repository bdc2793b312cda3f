from __future__ import annotations

import pytest

from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions, PerplexityToolOptions


def parse(line: str) -> list[PerplexityOptions]:
    return parse_options(PerplexityToolOptions, ["--corpus", "c", *line.split()]).one_by_one()


@pytest.mark.parametrize(
    "line",
    [
        "--checkpoint a --output a.json --checkpoint b --output b.json",
        "--checkpoint a b --output a.json b.json",
        "--output a.json --checkpoint a b --output b.json",
    ],
)
def test_several_checkpoints_share_the_other_options(line):
    found = parse(f"{line} --packing documents --overlap 16 --tensor-model-parallel-size 2")
    assert [(str(o.checkpoint), str(o.output)) for o in found] == [("a", "a.json"), ("b", "b.json")]
    assert {(o.packing, o.overlap) for o in found} == {("documents", 16)}
    assert {o.parallel.tensor_model_parallel_size for o in found} == {2}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--output a.json", "0 --checkpoint"),
        ("--checkpoint a", "1 --checkpoint and 0 --output"),
        ("--checkpoint a b --output a.json", "1 --output"),
        ("--checkpoint a b --output x.json x.json", r"--output x\.json x\.json"),
    ],
)
def test_mistakes_are_rejected(line, named):
    with pytest.raises(UserError, match=named):
        parse(line)
