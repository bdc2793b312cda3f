"""The paper's printed weights that ship with the package."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.published.columns import published_column, published_columns

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# Column -> what its printed figures sum to.
SUMS = {"pile/chameleon": 1.0171, "pile/doge": 1.1346, "pile/human": 0.998, "pile/regmix": 0.998}
SUMS |= {"slimpajama/chameleon-5k": 0.967, "wiki40b/chameleon-finetune": 1.001}
SUMS |= {"slimpajama/doremi-2k": 1.001, "slimpajama/chameleon-1k": 0.999}
SUMS |= {"slimpajama/chameleon-10k": 0.999}
RECIPES = {"slimpajama": "slimpajama_627b", "pile": "pile", "wiki40b": "wiki40b", "stack": "stack"}
RENAME = re.compile(r'"([^"=]+)=([a-z]\w*)"|([\w+]+)=([a-z]\w*)')


def names_of(recipe: str) -> dict[str, str]:
    """The source's name of each domain -> what its recipe of examples/data calls it."""
    text = (EXAMPLES / "data" / f"{recipe}.sh").read_text()
    body = text[text.index("NAMES=(") + len("NAMES=(") :]
    found = RENAME.findall(body[: body.index("\n\n")])
    return {quoted or bare: first or second for quoted, first, bare, second in found}


@pytest.mark.parametrize("name", published_columns())
def test_a_printed_column_sums_to_what_it_sums_to_in_print(name):
    assert published_column(name).printed_sum == pytest.approx(SUMS.get(name, 1.0), abs=1e-9)


@pytest.mark.parametrize("data_set", RECIPES)
def test_its_domains_are_those_of_the_recipe_by_either_name(data_set):
    ours = names_of(RECIPES[data_set])
    columns = [c for name, c in published_columns().items() if name.startswith(f"{data_set}/")]
    assert columns
    for column in columns:
        assert set(column.printed) == set(ours.values())
        renamed = {own: name for own, name in ours.items() if own != name}
        assert column.own_names == renamed


def test_the_columns_are_those_of_the_papers_tables():
    names = set(published_columns())
    for method in ("doremi", "doge", "chameleon", "regmix"):
        assert {f"slimpajama/{method}", f"pile/{method}"} <= names
    assert {"pile/human", "wiki40b/chameleon-finetune", "stack/chameleon-finetune"} <= names
    assert {"slimpajama/doremi-2k", "slimpajama/doge-2k"} <= names


def test_some_figures_as_they_stand_in_print():
    """From the tables of the paper's appendix, each from another part of the file."""
    for name, domain, weight in (
        ("slimpajama/doremi", "wikipedia", 0.236),
        ("slimpajama/chameleon", "c4", 0.247),
        ("pile/doge", "hackernews", 0.3949),
        ("pile/chameleon", "pile_cc", 0.4519),
        ("wiki40b/chameleon-finetune", "polish", 0.257),
        ("stack/chameleon-finetune", "go", 0.241),
        ("slimpajama/doge-2k", "book", 0.131),
    ):
        assert published_column(name).printed[domain] == weight


def test_a_wrong_name_lists_them_all():
    with pytest.raises(UserError) as refused:
        published_column("slimpajama/doremi2")
    assert all(name in str(refused.value) for name in published_columns())


def test_no_weight_of_the_file_is_there_twice():
    """json would keep the last of two entries of one name without a word."""

    def unique(pairs):
        names = [name for name, _ in pairs]
        assert len(names) == len(set(names))
        return dict(pairs)

    text = resources.files("megatron_chameleon.methods.published").joinpath("columns.json")
    json.loads(text.read_text(), object_pairs_hook=unique)
