"""Files of other trainers as their users write them, and mixtures that a format cannot hold."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

import pytest
import yaml

from megatron_chameleon.artifacts import Mixture, MixtureStage
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import ConvertOptions, read_mixture, write_mixture
from megatron_chameleon.interchange.convert import converted_text

OLMO_CORE = """
sources:
- {source_name: dclm, target_ratio: 0.7, paths: ['s3://b/dclm/*.npy']}
- {source_name: wiki, target_ratio: 0.2, paths: [w0.npy, w1.npy], max_repetition_ratio: 2.5}
- source_name: flan
  target_ratio: 0.1
  paths: [f.npy]
  max_repetition_ratio: 4
  max_source_fraction: 0.5
"""
OLMIX = """
name: heavy-code
data:
  sources:
  - name: dclm
    topics:
    - {name: code, paths: [c.npy]}
    - {name: science, quality: [{name: high, paths: [h.npy]}, {name: low, paths: [l.npy]}]}
  - {name: arxiv, paths: [a.npy]}
  - {name: unused, paths: [u.npy]}
priors:
  token_counts: {'dclm:code': 900_000_000_000_000_001, arxiv: 500}
mix:
  dclm:
    weight: 0.75
    repetition_factor: 2.0
    code: {weight: 0.5}
    science:
      weight: 0.5
      high: {weight: 0.75, repetition_factor: 3.5}
      low: {weight: 0.25}
  arxiv: {weight: 0.25}
"""
LEVANTER = """
data:
  components: {web: {}, code: {}, math: {}}
  train_weights:
  - [0, {web: 3, code: 1}]
  - [1000, {web: 0.5, math: 0.5}]
"""
REGMIX = """
train:
  train_the_pile_arxiv: 2.5e-1
  train_the_pile_github: 75e-2
valid:
  valid_the_pile_pile_cc: 1.0
model_name: tinyllama_1_1b
"""


def sources(mixture):
    assert mixture.sources is not None
    return mixture.sources


def written(tmp_path, text, name="mixture"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_olmo_core(tmp_path):
    mixture = read_mixture(written(tmp_path, OLMO_CORE), "olmo-core")
    assert mixture.weights == {"dclm": 0.7, "wiki": 0.2, "flan": 0.1}
    assert mixture.max_repetition == {"wiki": 2.5, "flan": 2.0}
    assert sources(mixture)["wiki"].files == {"train": ["w0.npy", "w1.npy"]}
    written_again = yaml.safe_load(write_mixture(mixture, "olmo-core"))["sources"]
    assert written_again[:2] == yaml.safe_load(OLMO_CORE)["sources"][:2]
    with pytest.raises(UserError, match=r"'dclm' has the files .* one .bin file"):
        write_mixture(dataclasses.replace(mixture, max_repetition=None), "megatron-data-args")
    below = dataclasses.replace(mixture, max_repetition={"wiki": 0.5})
    listed = yaml.safe_load(write_mixture(below, "olmo-core"))["sources"]
    assert listed[1]["max_source_fraction"] == 0.5


def test_olmix(tmp_path):
    mixture = read_mixture(written(tmp_path, OLMIX), "olmix")
    assert mixture.weights == {
        "dclm:code": 0.375,
        "dclm:science:high": 0.28125,
        "dclm:science:low": 0.09375,
        "arxiv": 0.25,
        "unused": 0.0,
    }
    caps = {"dclm:code": 2.0, "dclm:science:high": 3.5, "dclm:science:low": 2.0}
    assert mixture.max_repetition == caps
    assert sources(mixture)["dclm:science:low"].files == {"train": ["l.npy"]}
    assert sources(mixture)["dclm:code"].tokens == {"train": 900_000_000_000_000_001}


def test_levanter_and_regmix(tmp_path):
    with pytest.warns(UserWarning, match="sum to 4"):
        mixture = read_mixture(written(tmp_path, LEVANTER), "levanter")
    assert mixture.weights == {"web": 0.75, "code": 0.25, "math": 0.0}
    assert mixture.stages == [MixtureStage(1000, {"web": 0.5, "code": 0.0, "math": 0.5})]
    mixture = read_mixture(written(tmp_path, REGMIX), "regmix")
    assert mixture.weights == {"train_the_pile_arxiv": 0.25, "train_the_pile_github": 0.75}
    with pytest.raises(UserError, match="'codes' as files of 'code'"):
        write_mixture(Mixture({"code": 0.5, "web": 0.25, "codes": 0.25}), "regmix")


def test_splits_with_different_domains_or_weights_are_an_error(tmp_path):
    blends = {"train": ["1", "t/web", "3", "t/code"], "validation": ["1", "v/web", "3", "v/code"]}
    path = written(tmp_path, json.dumps(blends))
    with pytest.warns(UserWarning, match="sum to 4"):
        mixture = read_mixture(path, "automodel")
    assert mixture.weights == {"web": 0.25, "code": 0.75}
    assert sources(mixture)["web"].files == {
        "train": ["t/web.bin"],
        "valid": ["v/web.bin"],
        "test": [],
    }
    for listed in (["1", "v/web", "2", "v/code"], ["1", "v/web", "3", "v/wiki"]):
        path.write_text(json.dumps({**blends, "validation": listed}))
        with pytest.raises(UserError, match="--split train"):
            read_mixture(path, "automodel")
        with pytest.warns(UserWarning, match="sum to 4"):
            assert read_mixture(path, "automodel", split="train").weights == mixture.weights


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("olmo-core", "sources: [{source_name: a, target_ratio: 1}]", "paths of 'a'"),
        (
            "olmo-core",
            "sources: [{source_name: a, target_ratio: 1, paths: [a], max_repetition: 2}]",
            "unknown key 'max_repetition'",
        ),
        ("levanter", "train_weights: {a: 0.5, b: 0.25, a: 0.25}", "'a' is repeated"),
        ("levanter", "train_weights: [['0', {a: 1.0}], ['0', {a: 1.0}]]", "step 0: the steps must"),
        ("levanter", "train_weights: [[0, {a: 1.0}], [0, {a: 1.0}]]", "increase"),
        ("levanter", "train_weights: {a: .nan}", "'a' is nan"),
        ("olmix", "mix: {a: {weight: 1.0, repetition_factor: -1}}", "repetition of 'a'"),
        ("olmix", "mix: {a: {weight: x}}", "'a' is 'x'"),
        ("regmix", "train: {a: 1", "not YAML"),
        ("litgpt", '{"datasets": ["a"], "weights": []}', "same length"),
        ("megatron-data-path", "a b", "2 prefixes and 0 weights"),
        ("megatron-bridge", '{"blend": [["a", "b"], [1.0]]}', "2 prefixes and 1 weights"),
        ("megatron-bridge", '{"blend": [["x/a", "x/a"], [0.5, 0.5]]}', "two weights for"),
        ("automodel", '{"train": ["1", "a"], "dve": []}', "'dve'"),
        ("csv", "domain,weight\na,1\na,1\n", "duplicate domain 'a'"),
        ("csv", "domain,weight,step\na,1,1" + "0" * 20, "the step of 'a'"),
        ("megatron-bridge", '{"blend": [["a"], [1' + "0" * 400 + "]]}", "too many digits"),
        ("megatron-data-args", "1 a\n1" + "0" * 400 + " b", "prefixes only"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_place(name, text, problem, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=problem) as rejected:
        read_mixture(path, name)
    assert str(path) in str(rejected.value)
    assert "\n" not in str(rejected.value)


# Amounts of text


def test_amounts_become_weights_a_budget_and_limits(corpus, tmp_path):
    options = ConvertOptions(format="csv", tokens="news=10e9,code=2e9,poems=1", corpus=corpus.root)
    with pytest.warns(UserWarning, match="no weight for wiki"):
        table = converted_text(options)
    rows = {row["domain"]: row for row in csv.DictReader(io.StringIO(table))}
    counts = {name: int(row["tokens"]) for name, row in rows.items()}
    assert counts == {"news": 10_000_000_000, "code": 2_000_000_000, "poems": 1, "wiki(en)": 0}
    mixture = read_mixture(written(tmp_path, table), "csv")
    assert mixture.token_budget == 12_000_000_001
    assert mixture.weights["code"] == 2_000_000_000 / 12_000_000_001
    three = dataclasses.replace(options, tokens=None, epochs="news=3,code=1.5", format="olmo-core")
    with pytest.warns(UserWarning, match="no weight for"):
        listed = yaml.safe_load(converted_text(three))["sources"]
    limits = {source["source_name"]: source["max_repetition_ratio"] for source in listed}
    assert limits == {"news": 3.0, "code": 2.0}  # not repeated more often than asked
    sizes = corpus.train_tokens
    shares = {source["source_name"]: source["target_ratio"] for source in listed}
    total = 3 * sizes["news"] + 1.5 * sizes["code"]
    assert shares["news"] == pytest.approx(3 * sizes["news"] / total, rel=1e-12)


def test_a_table_may_have_tokens_or_epochs_instead_of_weights(corpus, tmp_path):
    mixture = read_mixture(written(tmp_path, "domain,tokens\na,9007199254740993\nb,1e3\n"), "csv")
    assert mixture.token_budget == 9007199254740993 + 1000
    text = "domain,epochs,train_tokens\na,2,50\nb,0.5,200\nc,,7\n"
    mixture = read_mixture(written(tmp_path, text), "csv")
    assert (mixture.weights, mixture.token_budget) == ({"a": 0.5, "b": 0.5, "c": 0.0}, 200)
    of_corpus = written(tmp_path, "domain,epochs\nnews,2\n")
    assert (
        read_mixture(of_corpus, "csv", corpus=corpus).token_budget
        == 2 * corpus.train_tokens["news"]
    )
    for damaged in (
        "domain,epochs\na,2\n",  # unknown size
        "domain,tokens,epochs\na,2,1\n",
        "domain,tokens,step\na,2,0\n",
        "domain,tokens\na,-2\n",
        "domain,tokens\na,0\n",
        "domain,weight,tokens\na,0.5,10\nb,0.5,30\n",
    ):
        with pytest.raises(UserError, match="mixture"):
            read_mixture(written(tmp_path, damaged), "csv")
    mistakes: tuple[dict[str, Any], ...] = (
        {"tokens": "a=1", "epochs": "a=1"},
        {"epochs": "a=1"},  # no corpus
        {"tokens": "a=0"},
        {"tokens": "a=1", "mixture_format": "csv"},
        {},
    )
    for settings in mistakes:
        with pytest.raises(UserError, match=r"--tokens|--epochs"):
            converted_text(ConvertOptions(format="json", **settings))


# Names


def test_names_are_matched_with_the_corpus(corpus, tmp_path):
    path = written(tmp_path, "train_weights: {pages: 0.25, code: 0.5, poem: 0.25}")
    options = ConvertOptions(
        format="json",
        mixture=path,
        mixture_format="levanter",
        corpus=corpus.root,
        rename=(("pages=news",), ("poem=poems",)),
    )
    with pytest.warns(UserWarning, match=r"no weight for wiki\(en\)"):
        mixture = read_mixture(written(tmp_path, converted_text(options), "m.json"))
    assert mixture.weights == {"news": 0.25, "code": 0.5, "poems": 0.25, "wiki(en)": 0.0}
    assert list(sources(mixture)) == corpus.names
    with pytest.raises(
        UserError, match=r"'pages', 'poem', which are not domains of .*'wiki\(en\)'"
    ):
        converted_text(dataclasses.replace(options, rename=()))
    for renames in (("x=news",), ("poem",), ("pages=code",), ("pages=news", "pages=web")):
        with pytest.raises(UserError, match="--rename"):
            converted_text(dataclasses.replace(options, rename=(renames,)))


def test_files_get_the_names_of_the_corpus_in_any_order(export, corpus, sampled, tmp_path):
    for name in ("megatron-data-args", "megatron-per-split", "megatron-bridge", "automodel"):
        path = written(tmp_path, export(name))
        mixture = read_mixture(path, name, corpus=corpus)
        assert mixture.weights == sampled
        for domain in sampled:
            prefix = corpus.prefix(domain, "train")
            assert sources(mixture)[domain].files["train"] == [f"{prefix}.bin"]
    lines = export("megatron-data-args").splitlines()
    path.write_text("\n".join(reversed(lines)))
    assert read_mixture(path, "megatron-data-args", corpus=corpus).weights == sampled
    path.write_text("\n".join([*lines[:-1], "0.5 /elsewhere/wiki(en)"]))
    with pytest.raises(UserError, match="does not have the files '/elsewhere/wiki"):
        read_mixture(path, "megatron-data-args", corpus=corpus)


# Stages and limits on repetition


def test_stages_and_caps_are_converted_by_choice(corpus, tmp_path):
    weights = {"news": 1.0, "code": 0.0}
    stages = [MixtureStage(10, {"news": 0.25, "code": 0.75})]
    path = tmp_path / "m.json"
    Mixture(weights, stages=stages, max_repetition={"code": 4.0}, scores=weights).save(path)
    options = ConvertOptions(format="litgpt", mixture=path)
    with pytest.raises(UserError, match="at step 10"):
        converted_text(options)
    options = dataclasses.replace(options, at_step=10)
    with pytest.raises(UserError, match="limit on repetition of 'code'"):
        converted_text(options)
    options = dataclasses.replace(options, drop_max_repetition=True)
    assert json.loads(converted_text(options))["weights"] == [0.25, 0.75]
    before = dataclasses.replace(options, at_step=9, format="levanter")
    assert yaml.safe_load(converted_text(before)) == {"train_weights": weights}
    # The scores belong to other weights.
    options = dataclasses.replace(options, format="json", drop_max_repetition=False)
    assert json.loads(converted_text(options))["scores"] is None


def test_a_mixture_that_changes_is_loaded_only_where_that_is_supported(tmp_path):
    path = tmp_path / "m.json"
    changing = Mixture({"a": 1.0}, stages=[MixtureStage(5, {"a": 1.0})])
    changing.save(path)
    with pytest.raises(UserError, match="change at step 5"):
        Mixture.load(path)
    assert Mixture.load(path, may_change=True) == changing
    assert changing.hash != changing.at_step(0).hash
    for damaged in ([{"step": 5, "weights": {"b": 1.0}}], [{"step": 0, "weights": {"a": 1.0}}]):
        path.write_text(json.dumps({"weights": {"a": 1.0}, "stages": damaged}))
        with pytest.raises(UserError, match=r"m\.json"):
            Mixture.load(path, may_change=True)


@pytest.mark.parametrize(
    "text",
    [
        # Ten levels of ten aliases each: a hundred billion values.
        "a0: &a0 [x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
        + "train_weights: {web: *a11, code: 1}\n",
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9))
        + "train_weights: *a8\n",
        "train_weights: &a {web: *a}\n",
        "train_weights: {web: !!bool x}\n",
        "train_weights: {web: !!timestamp x}\n",
        "train_weights: !!map [web]\n",
    ],
    ids=["aliases", "merged aliases", "recursion", "bool", "timestamp", "map"],
)
def test_hostile_yaml_is_one_line(tmp_path, text):
    path = tmp_path / "mixture.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="not YAML"):
        read_mixture(path, "levanter")


def test_yaml_of_many_domains_is_read_in_linear_time(tmp_path):
    path = tmp_path / "mixture.yaml"
    path.write_text("train_weights:\n" + "".join(f"  d{n}: 0.0001\n" for n in range(10_000)))
    assert len(read_mixture(path, "levanter").weights) == 10_000
