"""Weights that are given: in a line, a file, or by the name of a printed column."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.artifacts.published.columns import published_column
from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import ExportOptions, exported_text
from megatron_chameleon.methods.manual import ManualOptions, compute
from tests.small_corpus import write_small_corpus

SLIMPAJAMA = ("arxiv", "book", "cc", "c4", "github", "stackexchange", "wikipedia")


@pytest.fixture
def found(corpus, tmp_path):
    """``found(**changes)``: the mixture on disk."""

    def find(**changes):
        options = ManualOptions(**{"corpus": corpus.root, "output": tmp_path / "o.json", **changes})
        compute(options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is written sums to 1
            return Mixture.load(options.output)

    return find


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory):
    """A corpus with SlimPajama's domains, as the recipe of examples/data calls them."""
    return write_small_corpus(tmp_path_factory.mktemp("slimpajama"), SLIMPAJAMA).root


def test_weights_in_a_line(found, capsys):
    mixture = found(weights="news=0.25, code=0.75")
    assert mixture.weights == {"news": 0.25, "code": 0.75, "poems": 0.0}
    assert mixture.method == "manual"
    assert "no weight was given for poems: it is 0" in capsys.readouterr().out


def test_weights_are_divided_by_their_sum_with_a_warning(found):
    with pytest.warns(MixtureWarning, match="the weights sum to 4, not 1"):
        mixture = found(weights="news=1,code=3")
    assert mixture.weights == {"news": 0.25, "code": 0.75, "poems": 0.0}


def test_weights_of_a_mixture_file(found, tmp_path):
    given = Mixture({"code": 0.5, "poems": 0.5}, method="someone's")
    given.save(tmp_path / "given.json")
    mixture = found(weights=str(tmp_path / "given.json"))
    assert mixture.weights == {"news": 0.0, "code": 0.5, "poems": 0.5}
    assert mixture.parameters["file_method"] == "someone's"
    assert mixture.provenance.inputs["given mixture"] == given.hash


def test_a_mixture_is_not_written_over_itself(found, tmp_path):
    Mixture({"code": 0.5, "poems": 0.5}, method="someone's").save(tmp_path / "o.json")
    with pytest.raises(UserError, match=r"--weights and --output are both .*o\.json: give another"):
        found(weights=str(tmp_path / "o.json"))
    assert Mixture.load(tmp_path / "o.json").method == "someone's"


def test_what_a_mixture_has_cost_goes_with_it(found, tmp_path):
    """From folder to folder, and through a second mixture."""
    parameters = {
        "made_from": ["doremi/reference", "../2-proxy/tiny"],
        "total_cost": {"flops": 9e12, "device_seconds": 70.0},
        "paper_flops": 1.34e18,
    }
    weights, own = {"news": 0.5, "code": 0.5}, Cost(1e12, 3.0, 3.0)
    first = tmp_path / "a/4-mixture/doremi.json"
    Mixture(weights, method="doremi", parameters=parameters, cost=own).save(first)
    second = tmp_path / "b/4-mixture/given.json"
    mixture = found(weights=str(first), output=second)
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
    third = found(weights=str(second), output=tmp_path / "b/4-mixture/again.json").parameters
    assert third["made_from"][:2] == ["given.json", "../../a/4-mixture/doremi.json"]
    assert third["total_cost"]["flops"] == 9e12
    assert third["paper_flops"] == 1.34e18


def test_a_mixture_that_was_made_from_nothing_has_its_own_cost_as_the_sum(found, tmp_path):
    weights, cost = {"news": 0.5, "code": 0.5}, Cost(2e12, 3.0, 3.0)
    Mixture(weights, method="mine", cost=cost).save(tmp_path / "given.json")
    parameters = found(weights=str(tmp_path / "given.json")).parameters
    assert parameters["total_cost"]["flops"] == 2e12
    assert parameters["made_from"] == ["given.json"]
    assert "paper_flops" not in parameters


def test_no_sum_is_claimed_of_a_mixture_that_does_not_say_it(found, tmp_path):
    """Chameleon's proxy and embeddings have their cost in their own files."""
    weights = {"news": 0.5, "code": 0.5}
    made = dataclasses.replace(found(weights="news=1").provenance, inputs={"checkpoint": "0"})
    for name, fields in (
        ("chameleon", {"provenance": made}),
        ("old", {"parameters": {"made_from": ["proxy"]}}),
        ("fit", {"parameters": {"made_from": [], "unknown_costs": ["the runs"]}}),
    ):
        Mixture(weights, method=name, **fields).save(tmp_path / f"{name}.json")
        parameters = found(weights=str(tmp_path / f"{name}.json")).parameters
        assert "total_cost" not in parameters
        assert f"{name}.json" in parameters["made_from"]
    assert parameters["unknown_costs"] == ["the runs"]


def test_weights_of_a_line_say_nothing_of_a_cost(found):
    parameters = found(weights="news=1").parameters
    assert not {"made_from", "total_cost", "paper_flops"} & set(parameters)


@pytest.mark.parametrize(
    ("column", "flops"), [("doge", 6.68e17), ("regmix", 1.2e18), ("doge-2k", None)]
)
def test_a_printed_column_brings_its_printed_flops(found, slimpajama, column, flops):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixtureWarning)
        parameters = found(corpus=slimpajama, published=f"slimpajama/{column}").parameters
    assert parameters.get("paper_flops") == flops
    assert ("paper_flops" in parameters) == (flops is not None)


def test_weights_of_a_table_with_other_columns(found, tmp_path):
    table = tmp_path / "given.csv"
    table.write_text("tokens, weight, domain\n7, 0.4, news\n8, 0.6, poems\n")
    assert found(weights=str(table)).weights == {"news": 0.4, "code": 0.0, "poems": 0.6}


def test_an_exported_table_is_read_back(found, corpus, tmp_path):
    path = tmp_path / "mixture.json"
    Mixture({"news": 0.2, "code": 0.3, "poems": 0.5}).save(path)
    table = tmp_path / "exported.csv"
    table.write_text(exported_text(ExportOptions(mixture=path, corpus=corpus.root, format="csv")))
    assert found(weights=str(table)).weights == Mixture.load(path).weights


def test_a_printed_column_is_divided_by_its_sum_and_that_is_told(found, slimpajama, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is known of the column needs no warning
        mixture = found(corpus=slimpajama, published="slimpajama/chameleon-5k")
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    assert mixture.weights["wikipedia"] == pytest.approx(0.082 / 0.967)
    printed = published_column("slimpajama/chameleon-5k").printed
    assert mixture.parameters["printed"] == printed
    assert mixture.parameters["printed_sum"] == pytest.approx(0.967)
    assert "the printed weights sum to 0.967 and were divided by it" in capsys.readouterr().out


def test_a_corpus_may_have_the_data_sets_own_names(found, tmp_path):
    own = published_column("slimpajama/doremi").own_names
    names = [*own]
    names[names.index("RedPajamaStackExchange")] = "stackexchange"
    corpus = write_small_corpus(tmp_path / "own", names)
    mixture = found(corpus=corpus.root, published="slimpajama/doremi")
    assert list(mixture.weights) == names
    assert list(mixture.weights.values()) == pytest.approx(
        [0.057, 0.002, 0.237, 0.237, 0.13, 0.101, 0.236]
    )


def test_names_are_brought_together_added_up_and_left_out(found, capsys):
    renames = (("a=news", "b=news"), ("c=code", "d="))
    mixture = found(weights="a=0.1,b=0.3,c=0.4,d=0.2", rename=renames)
    assert mixture.weights == pytest.approx({"news": 0.5, "code": 0.5, "poems": 0.0})
    assert "left out: 0.2000 of the weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    "renames",
    [
        ("--rename", "a=news", "--rename", "b=code", "c="),
        ("--rename", "a=news", "b=code", "c="),
        ("--rename=a=news", "--rename=b=code", "--rename=c="),
    ],
)
def test_every_use_of_the_flag_counts(renames, corpus, tmp_path):
    """The last one alone would count of a plain tuple, and say nothing of the others."""
    argv = f"--corpus {corpus.root} --output {tmp_path}/o.json --weights a=0.2,b=0.6,c=0.2"
    options = parse_options(ManualOptions, [*argv.split(), *renames])
    assert options.renames == ["a=news", "b=code", "c="]
    compute(options)
    mixture = Mixture.load(options.output)
    assert mixture.weights == pytest.approx({"news": 0.25, "code": 0.75, "poems": 0.0})
    assert mixture.parameters["rename"] == options.renames


def test_a_message_on_names_leads_to_a_command_that_runs(found):
    """Each message is heeded word for word, in addition to what was given before."""
    with pytest.raises(UserError, match="--rename verse=NAME"):
        found(weights="verse=0.5,prose=0.5", rename=(("prose=code",),))
    mixture = found(weights="verse=0.5,prose=0.5", rename=(("prose=code",), ("verse=poems",)))
    assert mixture.weights == {"news": 0.0, "code": 0.5, "poems": 0.5}


def test_some_domains_alone_keep_their_ratios(found, capsys):
    mixture = found(weights="news=0.2,code=0.3,poems=0.5", domains="code,news")
    assert mixture.weights == pytest.approx({"news": 0.4, "code": 0.6})
    assert "left out: 0.5000 of the weight" in capsys.readouterr().out


def test_a_limit_of_epochs_holds_given_weights_too(found, corpus):
    budget = corpus.train_tokens["news"] * 2
    with pytest.warns(MixtureWarning, match="--max-epochs 1 holds news down"):
        mixture = found(weights="news=0.9,code=0.1,poems=0", token_budget=budget, max_epochs=1.0)
    assert mixture.weights["news"] == pytest.approx(0.5)
    assert mixture.unconstrained["news"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "takes its weights from --weights"),
        ({"weights": "news=1", "published": "pile/doge"}, "leave one of them out"),
        ({"weights": "news"}, "'news' is not NAME=WEIGHT; a file ends in .json or .csv"),
        ({"weights": "=1"}, "'=1' is not NAME=WEIGHT"),
        ({"weights": ""}, "it names no domain"),
        ({"weights": "news=much"}, "the weight 'much' of 'news' is not a number"),
        ({"weights": "news=1,news=2"}, "domain 'news' is there twice"),
        ({"weights": "news=1,code=-1"}, "weight of 'code' is -1.0; weights are finite"),
        ({"weights": "news=1,code=nan"}, "weight of 'code' is nan"),
        ({"weights": "news=0,code=0"}, "all weights are zero"),
        (
            {"weights": "news=1,verse=1"},
            "'verse' is no domain of the corpus, whose domains are news, code, poems; add "
            "--rename verse=NAME, with the corpus's NAME for it, or --rename verse= to leave it",
        ),
        (
            {"weights": "verse=1,news=1,prose=1"},
            "'verse', 'prose' are no domains of the corpus, whose domains are news, code, poems; "
            "for each of them add --rename verse=NAME",
        ),
        ({"weights": "news=1", "rename": (("verse=news",),)}, "with OLD one of news"),
        ({"weights": "news=1", "rename": (("news",),)}, "--rename news: give OLD=NEW"),
        (
            {"weights": "news=1", "rename": (("news=code",), ("news=poems",))},
            "'news' is renamed twice",
        ),
        (
            {"weights": "news=1", "rename": (("news=verse",),)},
            "--rename news=verse: the corpus has no domain 'verse'; after the '=' goes one of its "
            "own, news, code, poems, or nothing",
        ),
        ({"weights": "news=1", "rename": (("news=",),)}, "no weight for any of news, code, poems"),
        ({"weights": "news=1", "domains": "code"}, "no weight for any of code"),
        ({"weights": "lost.csv"}, "--weights lost.csv: cannot be read"),
        ({"weights": "lost.json"}, "lost.json does not exist"),
        ({"published": "slimpajama"}, "there is no column of that name; there are slimpajama/dor"),
        (
            {"published": "slimpajama/doge"},
            "'arxiv', 'book', 'cc', 'c4', 'github', 'stackexchange'",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*the weights sum to")
def test_a_mistake_has_one_line_and_writes_nothing(found, tmp_path, changes, problem):
    with pytest.raises(UserError) as refused:
        found(**changes)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name,share\nnews,1\n", "a header with the columns domain and weight"),
        (b"domain,weight\n", "a row for each domain below it"),
        (b"", "a header with the columns"),
        (b"domain,weight\nnews\n", "the weight '' of 'news' is not a number"),
        (b"domain,weight\nnews,1\nnews,2\n", "domain 'news' is there twice"),
        (b"domain,weight\nn\xff,1\n", "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_refused(found, tmp_path, content, problem):
    (tmp_path / "given.csv").write_bytes(content)
    with pytest.raises(UserError) as refused:
        found(weights=str(tmp_path / "given.csv"))
    assert problem in str(refused.value)
    assert "given.csv" in str(refused.value)
