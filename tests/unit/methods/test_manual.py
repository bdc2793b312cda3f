"""Known weights: from the command line, a file, or a printed column."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.artifacts.published import published_column
from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import ExportOptions, exported_text
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.manual.compute import compute_manual
from tests.small_corpus import write_small_corpus

SLIMPAJAMA = ("arxiv", "book", "cc", "c4", "github", "stackexchange", "wikipedia")


@pytest.fixture
def manual(corpus, tmp_path):
    """``manual(**changes)``: the mixture on disk."""

    def run(**changes):
        options = ManualOptions(**{"corpus": corpus.root, "output": tmp_path / "o.json", **changes})
        compute_manual(options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # its weights sum to 1
            return Mixture.load(options.output)

    return run


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory):
    """A corpus with SlimPajama's domains, named as in examples/data."""
    return write_small_corpus(tmp_path_factory.mktemp("slimpajama"), SLIMPAJAMA).root


def test_weights_of_the_command_line(manual):
    mixture = manual(weights="news=0.25, code=0.75")
    assert mixture.weights == {"news": 0.25, "code": 0.75, "poems": 0.0}
    assert not {"made_from", "total_cost", "paper_flops"} & set(mixture.parameters)
    with pytest.warns(MixtureWarning, match="4"):
        assert manual(weights="news=1,code=3").weights == mixture.weights
    some = manual(weights="news=0.2,code=0.3,poems=0.5", domains="code,news")
    assert some.weights == pytest.approx({"news": 0.4, "code": 0.6})


def test_weights_of_a_mixture_file(manual, tmp_path):
    given = Mixture({"code": 0.5, "poems": 0.5}, method="other")
    given.save(tmp_path / "given.json")
    mixture = manual(weights=str(tmp_path / "given.json"))
    assert mixture.weights == {"news": 0.0, "code": 0.5, "poems": 0.5}
    assert mixture.parameters["file_method"] == "other"
    assert mixture.provenance.inputs["given mixture"] == given.hash
    with pytest.raises(UserError, match="--output"):
        manual(weights=str(tmp_path / "given.json"), output=tmp_path / "given.json")
    assert Mixture.load(tmp_path / "given.json").method == "other"


def test_weights_of_a_csv_table(manual, corpus, tmp_path):
    table = tmp_path / "given.csv"
    table.write_text("tokens, weight, domain\n7, 0.4, news\n8, 0.6, poems\n")
    assert manual(weights=str(table)).weights == {"news": 0.4, "code": 0.0, "poems": 0.6}
    path = tmp_path / "mixture.json"
    Mixture({"news": 0.2, "code": 0.3, "poems": 0.5}).save(path)
    table.write_text(exported_text(ExportOptions(mixture=path, corpus=corpus.root, format="csv")))
    assert manual(weights=str(table)).weights == Mixture.load(path).weights


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"name,share\nnews,1\n",
        b"domain,weight\nn\xff,1\n",
        b"domain,weight\nnews,0.5\ncode\n",  # short
        b"domain,weight\nnews,0.5\n,0.5\n",
        b"domain,weight\nnews,0,5\ncode,0,5\n",  # long: decimal commas
    ],
)
def test_a_damaged_csv_table_is_an_error(manual, tmp_path, content):
    table = tmp_path / "given.csv"
    table.write_bytes(content)
    with pytest.raises(UserError, match=r"given\.csv") as error:
        manual(weights=str(table))
    assert "\n" not in str(error.value)


def test_the_cost_of_a_mixture_is_inherited_across_folders(manual, tmp_path):
    parameters = {
        "made_from": ["doremi/reference", "../2-proxy/tiny"],
        "total_cost": {"flops": 9e12, "device_seconds": 70.0},
        "paper_flops": 1.34e18,
    }
    weights, own = {"news": 0.5, "code": 0.5}, Cost(1e12, 3.0, 3.0)
    first = tmp_path / "a/4-mixture/doremi.json"
    Mixture(weights, method="doremi", parameters=parameters, cost=own).save(first)
    second = tmp_path / "b/4-mixture/given.json"
    mixture = manual(weights=str(first), output=second)
    assert mixture.parameters["made_from"] == [
        "../../a/4-mixture/doremi.json",
        "../../a/4-mixture/doremi/reference",
        "../../a/2-proxy/tiny",
    ]
    assert mixture.cost.flops == 0.0
    spent = mixture.cost.device_seconds
    assert spent > 0
    assert mixture.parameters["total_cost"] == {"flops": 9e12, "device_seconds": 70.0 + spent}
    assert mixture.parameters["paper_flops"] == 1.34e18


def test_the_total_cost_is_recorded_only_if_known(manual, tmp_path):
    weights, own = {"news": 0.5, "code": 0.5}, Cost(2e12, 3.0, 3.0)
    # Chameleon's proxy and embeddings record their own cost.
    made = dataclasses.replace(manual(weights="news=1").provenance, inputs={"checkpoint": "0"})
    for name, fields, known in (
        ("mine", {}, True),
        ("chameleon", {"provenance": made}, False),
        ("old", {"parameters": {"made_from": ["proxy"]}}, False),
        ("fit", {"parameters": {"made_from": [], "unknown_costs": ["the runs"]}}, False),
    ):
        Mixture(weights, method=name, cost=own, **fields).save(tmp_path / f"{name}.json")
        parameters = manual(weights=str(tmp_path / f"{name}.json")).parameters
        assert parameters.get("total_cost", {}).get("flops") == (2e12 if known else None)
        assert f"{name}.json" in parameters["made_from"]
        assert "paper_flops" not in parameters
    assert parameters["unknown_costs"] == ["the runs"]


def test_a_printed_column_is_divided_by_its_sum_without_a_warning(manual, slimpajama):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixture = manual(corpus=slimpajama, published="slimpajama/chameleon-5k")
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    assert mixture.weights["wikipedia"] == pytest.approx(0.082 / 0.967)
    printed = published_column("slimpajama/chameleon-5k").printed
    assert mixture.parameters["printed"] == printed
    assert mixture.parameters["printed_sum"] == pytest.approx(0.967)
    for column, flops in (("doge", 6.68e17), ("doge-2k", None)):
        parameters = manual(corpus=slimpajama, published=f"slimpajama/{column}").parameters
        assert parameters.get("paper_flops") == flops


def test_a_corpus_may_use_the_names_of_the_data_set(manual, tmp_path):
    own = published_column("slimpajama/doremi").own_names
    names = [*own]
    names[names.index("RedPajamaStackExchange")] = "stackexchange"
    corpus = write_small_corpus(tmp_path / "own", names)
    mixture = manual(corpus=corpus.root, published="slimpajama/doremi")
    assert list(mixture.weights) == names
    assert list(mixture.weights.values()) == pytest.approx(
        [0.057, 0.002, 0.237, 0.237, 0.13, 0.101, 0.236]
    )


def test_names_are_renamed_summed_and_dropped(corpus, tmp_path, capsys):
    renames = ("--rename", "a=news", "--rename", "b=news", "c=code", "d=")
    argv = f"--corpus {corpus.root} --output {tmp_path}/o.json --weights a=0.1,b=0.3,c=0.4,d=0.2"
    options = parse_options(ManualOptions, [*argv.split(), *renames])
    assert options.renames == ["a=news", "b=news", "c=code", "d="]
    compute_manual(options)
    mixture = Mixture.load(options.output)
    assert mixture.weights == pytest.approx({"news": 0.5, "code": 0.5, "poems": 0.0})
    assert mixture.parameters["rename"] == options.renames
    assert "dropped 0.2000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "--weights"),
        ({"weights": "news=1", "published": "pile/doge"}, "--published"),
        ({"weights": "news"}, "NAME=WEIGHT"),
        ({"weights": "news=much"}, "'much'"),
        ({"weights": "news=1,news=2"}, "'news'"),
        ({"weights": " , "}, "zero"),
        ({"weights": "verse=1,news=1"}, "--rename verse=NAME"),
        ({"weights": "news=1", "rename": (("verse=news",),)}, "--rename verse=news"),
        ({"weights": "news=1", "rename": (("news=verse",),)}, "'verse'"),
        ({"weights": "news=1", "domains": "code"}, "code"),
        ({"weights": "lost.csv"}, "lost.csv"),
        ({"published": "slimpajama/doge"}, "'arxiv', 'book'"),
    ],
)
@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_mistakes_are_errors_and_write_nothing(manual, tmp_path, changes, problem):
    with pytest.raises(UserError) as error:
        manual(**changes)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "o.json").exists()
