from __future__ import annotations

import dataclasses

import pytest

from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.plan import Plan, make_plan
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.corpus.tokenizer import load_tokenizer

EOD = "<|endoftext|>"


@pytest.fixture
def options(tmp_path, jsonl, texts, tokenizer_json):
    paths = [f"a={jsonl('a.jsonl', texts(30, 1))}", f"b={jsonl('b.jsonl', texts(20, 2))}"]
    return PreprocessOptions(SourceOptions((tuple(paths),)), tmp_path / "out", tokenizer_json)


def plan_of(options):
    tokenizer = load_tokenizer(options.tokenizer_model, options.eod_token)
    return make_plan(options, tokenizer, find_sources(options.source, options.domains))


@pytest.fixture
def begun(options, tmp_path):
    """The plan of ``options`` as it is read from a file."""
    plan = dataclasses.replace(plan_of(options), root=tmp_path / "begun")
    plan.save()
    return Plan.load(plan.root)


def difference(options, begun, **changes):
    found = plan_of(dataclasses.replace(options, **changes)).difference(begun)
    assert found is None or (
        "\n" not in found and f"remove {begun.root} to start from scratch" in found
    )
    return found


def test_a_plan_is_read_as_it_was_written(options, begun):
    assert dataclasses.replace(plan_of(options), root=begun.root) == begun
    assert difference(options, begun) is None
    assert len(begun.hash) == 64


def test_what_shards_do_not_depend_on_is_no_difference(options, begun):
    changes = {
        "drop_duplicates": False,
        "min_tokens_per_split": 9,
        "overwrite": True,
        "workers": 3,
        "shard": "1/2",
        "source": dataclasses.replace(options.source, max_malformed_share=0.5),
    }
    assert difference(options, begun, **changes) is None


def test_inputs_that_lead_to_the_same_files_are_no_difference(options, begun, tmp_path):
    source = SourceOptions(((f"a={tmp_path}/[a].jsonl",), (f"b={tmp_path}/b.jsonl",)))
    assert difference(options, begun, source=source) is None


def test_an_option_that_differs_is_named_with_both_values(options, begun, tokenizer_json):
    assert str(difference(options, begun, split="80,10,10")).startswith(
        "--split is '80,10,10' and was '90,5,5' when"
    )
    assert str(difference(options, begun, shard_bytes=1000)).startswith(
        "--shard-bytes is 1000 and was 256000000 when"
    )
    source = dataclasses.replace(options.source, text_key="body")
    assert "--text-key is 'body' and was 'text'" in str(difference(options, begun, source=source))
    plan = plan_of(options)
    keyed = dataclasses.replace(plan, options={**plan.options, "domain_key": "meta.set"})
    assert "--domain-key is 'meta.set' and was not given" in str(keyed.difference(begun))


def test_another_tokenizer_is_a_difference(options, begun, sentencepiece_model):
    found = difference(options, begun, tokenizer_model=sentencepiece_model)
    assert str(found).startswith("--tokenizer-model has changed")


def test_sources_that_differ_are_named(options, begun, tmp_path, jsonl, texts):
    def found(*inputs):
        return difference(options, begun, source=SourceOptions((inputs,)))

    a, b = f"a={tmp_path}/a.jsonl", f"b={tmp_path}/b.jsonl"
    more = f"a={jsonl('more.jsonl', texts(10))}"
    assert found(a, b, more).startswith(f"{tmp_path}/more.jsonl was not among the sources")
    assert found(a).startswith(f"{tmp_path}/b.jsonl was among the sources")
    assert found(b, a).startswith("the sources came in another order")
    other = found(a, f"c={tmp_path}/b.jsonl")
    assert other.startswith(f"{tmp_path}/b.jsonl belonged to another domain or split")
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes()[:-1])
    size = (tmp_path / "b.jsonl").stat().st_size
    assert f"it holds {size} bytes and held {size + 1} when" in found(a, b)
