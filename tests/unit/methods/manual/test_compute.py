"""--method manual: weights from the command line, a file, or a column of a published table."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from megatron_chameleon.artifacts import Cost, Mixture, MixtureWarning
from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import write_mixture
from megatron_chameleon.interchange.published import published_column
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.manual.compute import compute_manual
from tests.small_corpus import write_small_corpus

SLIMPAJAMA = ("arxiv", "book", "cc", "c4", "github", "stackexchange", "wikipedia")


@pytest.fixture
def manual(corpus, tmp_path):
    """``manual(**changes)``: run --method manual and load the mixture that it wrote."""

    def run(**changes):
        options = ManualOptions(**{"corpus": corpus.root, "output": tmp_path / "o.json", **changes})
        compute_manual(options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # loading must not warn that weights do not sum to 1
            return Mixture.load(options.output)

    return run


def test_weights_of_the_command_line(manual):
    mixture = manual(weights="news=0.25, code=0.75")
    assert mixture.weights == {"news": 0.25, "code": 0.75, "poems": 0.0}
    with pytest.warns(MixtureWarning, match="4"):
        assert manual(weights="news=1,code=3").weights == mixture.weights
    some = manual(weights="news=0.2,code=0.3,poems=0.5", domains="code,news")
    assert some.weights == pytest.approx({"news": 0.4, "code": 0.6})


def test_tokens_and_epochs_set_weights_and_budget(manual, corpus):
    mixture = manual(tokens="news=3e6,code=1e6")
    assert mixture.weights == {"news": 0.75, "code": 0.25, "poems": 0.0}
    assert mixture.token_budget == 4_000_000
    some = manual(tokens="news=3e6,code=1e6,old=6e6", rename=(("old=",),), domains="news,poems")
    assert some.weights == {"news": 1.0, "poems": 0.0}
    assert some.token_budget == 3_000_000  # the tokens of other names are not sampled
    sizes = corpus.train_tokens
    mixture = manual(epochs="news=1,poems=2.5")
    assert mixture.token_budget == round(sizes["news"] + 2.5 * sizes["poems"])
    expected = {"news": 1.0, "code": 0.0, "poems": 2.5}
    assert mixture.epochs == pytest.approx(expected, rel=1e-4)  # the budget is a whole number


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": "news=1e6", "epochs": "news=1"},
        {"tokens": "news=1e6", "token_budget": 10},
        {"epochs": "news=1", "max_epochs": 2.0},
        {"tokens": "news=1e30"},
        {"tokens": "news=0"},
        {"epochs": "news=nan"},
        {"epochs": "news=1,news=2"},
    ],
    ids=str,
)
def test_amounts_that_cannot_be_sampled_are_errors(manual, changes, tmp_path):
    with pytest.raises(UserError, match=r"--tokens|--epochs"):
        manual(**changes)
    assert not list(tmp_path.iterdir())


def test_weights_of_a_mixture_file(manual, tmp_path):
    given = Mixture({"code": 0.5, "poems": 0.5}, method="other")
    given.save(tmp_path / "given.json")
    mixture = manual(weights=str(tmp_path / "given.json"))
    assert mixture.weights == {"news": 0.0, "code": 0.5, "poems": 0.5}
    assert mixture.parameters["file_method"] == "other"
    assert mixture.provenance.inputs["given mixture"] == given.hash
    with pytest.raises(UserError, match="--output"):
        manual(weights=str(tmp_path / "given.json"), output=tmp_path / "given.json")


def test_weights_of_a_csv_table(manual, corpus, tmp_path):
    table = tmp_path / "given.csv"
    table.write_text("train_tokens, weight, domain\n7, 0.4, news\n8, 0.6, poems\n")
    assert manual(weights=str(table)).weights == {"news": 0.4, "code": 0.0, "poems": 0.6}
    table.write_text("domain,epochs\nnews,2\npoems,0\n")
    assert manual(weights=str(table)).token_budget == 2 * corpus.train_tokens["news"]
    assert manual(weights=str(table), token_budget=100).token_budget == 100
    path = tmp_path / "mixture.json"
    Mixture({"news": 0.2, "code": 0.3, "poems": 0.5}).save(path)
    table.write_text(write_mixture(Mixture.load(path), "csv"))
    assert manual(weights=str(table)).weights == Mixture.load(path).weights


@pytest.mark.parametrize(
    "content",
    [
        b"domain,weight,max_repetitions\nnews,1,4\n",  # a misspelt column
        b"domain,weight\nn\xff,1\n",
        b"domain,weight\nnews,0.5\ncode\n",  # a row with too few fields
        b"domain,weight\nnews,0,5\ncode,0,5\n",  # decimal commas give rows too many fields
    ],
)
def test_a_damaged_csv_table_is_an_error(manual, tmp_path, content):
    (tmp_path / "given.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"given\.csv"):
        manual(weights=str(tmp_path / "given.csv"))


def test_the_total_cost_of_a_mixture_is_inherited_if_known(manual, tmp_path):
    recorded = {
        "made_from": ["doremi/reference", "../2-proxy/tiny"],
        "total_cost": {"flops": 9e12, "device_seconds": 70.0},
        "paper_flops": 1.34e18,
    }
    # A Chameleon mixture does not include the cost of its proxy and embeddings.
    by_proxy = dataclasses.replace(manual(weights="news=1").provenance, inputs={"checkpoint": "0"})
    for name, fields, flops in (
        ("doremi", {"parameters": recorded}, 9e12),
        ("mine", {}, 2e12),
        ("chameleon", {"provenance": by_proxy}, None),
        ("old", {"parameters": {"made_from": ["proxy"]}}, None),
        ("fit", {"parameters": {"unknown_costs": ["the runs"]}}, None),
    ):
        file = tmp_path / f"a/4-mixture/{name}.json"
        Mixture({"news": 1.0}, method=name, cost=Cost(2e12, 3.0, 3.0), **fields).save(file)
        mixture = manual(weights=str(file), output=tmp_path / f"b/4-mixture/{name}.json")
        found = mixture.parameters
        assert found.get("total_cost", {}).get("flops") == flops
        assert found["made_from"][0] == f"../../a/4-mixture/{name}.json"
        assert found.get("unknown_costs") == fields.get("parameters", {}).get("unknown_costs")
        if name == "doremi":
            paths = ["../../a/4-mixture/doremi/reference", "../../a/2-proxy/tiny"]
            assert found["made_from"][1:] == paths
            assert found["total_cost"]["device_seconds"] == 70.0 + mixture.cost.device_seconds
            assert found["paper_flops"] == 1.34e18


def test_a_printed_column_is_divided_by_its_sum_without_a_warning(manual, tmp_path):
    corpus = write_small_corpus(tmp_path / "slimpajama", SLIMPAJAMA).root
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixture = manual(corpus=corpus, published="slimpajama/chameleon-5k")
    assert mixture.weights["wikipedia"] == pytest.approx(0.082 / 0.967)
    assert mixture.parameters["printed_sum"] == pytest.approx(0.967)
    for column, flops in (("doge", 6.68e17), ("doge-2k", None)):
        parameters = manual(corpus=corpus, published=f"slimpajama/{column}").parameters
        assert parameters.get("paper_flops") == flops


def test_a_corpus_may_use_the_names_of_the_data_set(manual, tmp_path):
    names = [*published_column("slimpajama/doremi").own_names]
    names[names.index("RedPajamaStackExchange")] = "stackexchange"
    corpus = write_small_corpus(tmp_path / "own", names)
    weights = manual(corpus=corpus.root, published="slimpajama/doremi").weights
    printed = [0.057, 0.002, 0.237, 0.237, 0.13, 0.101, 0.236]
    assert weights == pytest.approx(dict(zip(names, printed, strict=True)))


def test_names_are_renamed_summed_and_dropped(corpus, tmp_path, capsys):
    renames = ("--rename", "a=news", "--rename", "b=news", "c=code", "d=")
    argv = f"--corpus {corpus.root} --output {tmp_path}/o.json --weights a=0.1,b=0.3,c=0.4,d=0.2"
    options = parse_options(ManualOptions, [*argv.split(), *renames])
    compute_manual(options)
    mixture = Mixture.load(options.output)
    assert mixture.weights == pytest.approx({"news": 0.5, "code": 0.5, "poems": 0.0})
    assert mixture.parameters["rename"] == ["a=news", "b=news", "c=code", "d="]
    assert "dropped 0.2000" in capsys.readouterr().out


def test_a_held_out_domain_gets_no_weight(manual, held_out_corpus):
    weights = {"weights": "news=0.2,code=0.3,poems=0.5", "corpus": held_out_corpus.root}
    with pytest.raises(UserError, match="'poems' is held out"):
        manual(**weights)
    mixture = manual(**weights, rename=(("poems=",),))
    assert mixture.weights == pytest.approx({"news": 0.4, "code": 0.6})
    with pytest.raises(UserError, match="'poems' is held out"):
        manual(weights="news=1", corpus=held_out_corpus.root, domains="poems")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "--weights"),
        ({"weights": "news"}, "NAME=WEIGHT"),
        ({"weights": "news=1,news=2"}, "'news'"),
        ({"weights": "verse=1,news=1"}, "--rename verse=NAME"),
        ({"weights": "news=1", "rename": (("verse=news",),)}, "--rename verse=news"),
        ({"weights": "news=1", "rename": (("news=verse",),)}, "'verse'"),
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
