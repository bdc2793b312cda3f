"""The paper's printed weights that ship with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_chameleon.interchange.published import published_columns

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# Column -> sum of its printed weights, which is not always 1.
SUMS = {"pile/chameleon": 1.0171, "pile/doge": 1.1346, "pile/human": 0.998, "pile/regmix": 0.998}
SUMS |= {"slimpajama/chameleon-5k": 0.967, "wiki40b/chameleon-finetune": 1.001}
SUMS |= {"slimpajama/doremi-2k": 1.001, "slimpajama/chameleon-1k": 0.999}
SUMS |= {"slimpajama/chameleon-10k": 0.999, "slimpajama/chameleon-size-60m": 0.98}
SUMS |= {"slimpajama/chameleon-size-210m": 0.999, "slimpajama/chameleon-lambda-1": 0.99}
SUMS |= {"slimpajama/chameleon-lambda-100": 0.999}
RECIPES = {"slimpajama": "slimpajama_627b", "pile": "pile", "wiki40b": "wiki40b", "stack": "stack"}
RENAME = re.compile(r'"([^"=]+)=([a-z]\w*)"|([\w+]+)=([a-z]\w*)')


def names_of(recipe: str) -> dict[str, str]:
    """Name of each domain in the source -> name in the recipe of examples/data."""
    text = (EXAMPLES / "data" / f"{recipe}.sh").read_text()
    body = text[text.index("NAMES=(") + len("NAMES=(") :]
    found = RENAME.findall(body[: body.index("\n\n")])
    return {quoted or bare: first or second for quoted, first, bare, second in found}


def test_printed_columns_have_the_printed_sums():
    for name, column in published_columns().items():
        assert column.printed_sum == pytest.approx(SUMS.get(name, 1.0), abs=1e-9), name


@pytest.mark.parametrize("data_set", RECIPES)
def test_domains_are_those_of_the_recipe(data_set):
    ours = names_of(RECIPES[data_set])
    columns = [c for name, c in published_columns().items() if name.startswith(f"{data_set}/")]
    assert columns
    for column in columns:
        assert set(column.printed) == set(ours.values())
        renamed = {own: name for own, name in ours.items() if own != name}
        assert column.own_names == renamed
