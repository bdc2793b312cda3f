from __future__ import annotations

import json
import shutil

import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from megatron_chameleon.artifacts import SPLITS, Corpus, MixtureWarning
from megatron_chameleon.blend.data_path import DataPath
from megatron_chameleon.errors import UserError
from tests.small_corpus import EOD, VOCAB_SIZE
from tests.unit.blend.token_files import MegatronTokenizer


def expected_blend(corpus, drawn, split):
    """What Megatron is to make of an export: prefixes and weights, both to the last bit."""
    return [str(corpus.prefix(name, split)) for name in drawn], list(drawn.values())


@pytest.mark.parametrize("split", SPLITS)
def test_megatron_reads_the_weights_and_files_of_a_data_path(export, corpus, drawn, split):
    line = export("megatron-data-path", split=split)
    assert line.count("\n") == 1
    assert get_blend_from_list(line.split()) == expected_blend(corpus, drawn, split)


def test_our_own_data_path_option_reads_it_too(export, corpus, drawn):
    prefixes, weights = expected_blend(corpus, drawn, "train")
    assert DataPath.parse(export("megatron-data-path")) == DataPath(tuple(prefixes), tuple(weights))


def test_megatron_reads_a_data_args_file(export, corpus, drawn):
    text = export("megatron-data-args")
    assert text.count("\n") == len(drawn)
    # Megatron-LM reads the whole file and splits it at white space.
    assert get_blend_from_list(text.split()) == expected_blend(corpus, drawn, "train")


def test_megatron_reads_every_split_of_a_per_split_file(export, corpus, drawn):
    loaded = json.loads(export("megatron-per-split"))
    assert list(loaded) == list(SPLITS)
    for split in SPLITS:
        assert get_blend_from_list(loaded[split]) == expected_blend(corpus, drawn, split)


def test_the_arguments_for_megatron_bridge_are_those_of_megatrons_config(export, corpus, drawn):
    arguments = json.loads(export("megatron-bridge"))
    # The class that Megatron Bridge's GPTDatasetConfig derives from, and whose checks it runs.
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=16, **arguments)
    assert not config.mock
    assert [tuple(blend) for blend in config.blend_per_split] == [
        expected_blend(corpus, drawn, split) for split in SPLITS
    ]


@pytest.fixture
def built(one_rank, tmp_path):
    """``built(arguments, num_samples)``: train, valid and test by Megatron's own builder."""

    def build(arguments, num_samples):
        config = GPTDatasetConfig(
            random_seed=11,
            sequence_length=16,
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=MegatronTokenizer(EOD, VOCAB_SIZE),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            **arguments,
        )
        sizes = [num_samples] * 3
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

    return build


def shares_drawn(dataset):
    assert isinstance(dataset, BlendedDataset)
    domains = [int(dataset[index]["dataset_id"]) for index in range(len(dataset))]
    return [domains.count(number) / len(domains) for number in range(len(dataset.datasets))]


def test_megatron_draws_from_our_files_by_the_exported_weights(export, corpus, drawn, built):
    datasets = built(json.loads(export("megatron-bridge")), 300)
    for split, dataset in zip(SPLITS, datasets, strict=True):
        paths = [part.dataset.path_prefix for part in dataset.datasets]
        assert paths == [str(corpus.prefix(name, split)) for name in drawn]
        # Megatron's blend is never further than a sample from the weights.
        assert shares_drawn(dataset) == pytest.approx(list(drawn.values()), abs=1 / 300)


def test_a_domain_without_validation_text_leaves_its_share_to_the_others(
    export, corpus, drawn, built, tmp_path
):
    copy = without_text(corpus, tmp_path / "copy", "code", ("valid",))
    with pytest.warns(MixtureWarning, match="no valid tokens of code"):
        arguments = json.loads(export("megatron-bridge", corpus=copy))
    train, valid, test = (dict(zip(*blend, strict=True)) for blend in arguments["blend_per_split"])
    assert len(train) == len(test) == len(drawn) == len(valid) + 1
    assert sum(valid.values()) == pytest.approx(1, abs=1e-15)
    rest = drawn["news"] / (1 - drawn["code"])
    assert shares_drawn(built(arguments, 300)[1])[0] == pytest.approx(rest, abs=1 / 300)


def test_a_split_without_any_text_is_null_to_megatron(export, corpus, tmp_path):
    copy = tmp_path / "copy"
    for name in corpus.names:
        without_text(corpus, copy, name, ("test",))
    with pytest.warns(MixtureWarning, match="no test tokens"):
        loaded = json.loads(export("megatron-per-split", corpus=copy))
    assert get_blend_from_list(loaded["test"]) is None
    with pytest.warns(MixtureWarning), pytest.raises(UserError, match="has test tokens"):
        export("megatron-data-path", corpus=copy, split="test")


def test_a_weight_on_a_domain_without_training_text_is_refused(export, corpus, tmp_path):
    copy = without_text(corpus, tmp_path / "copy", "news", ("train",))
    with pytest.raises(UserError, match="'news' a weight, but the corpus has no"):
        export("megatron-data-path", corpus=copy)


@pytest.mark.parametrize("folder", ["my data", "a*b", "set[1]", "cost$", "it's"])
def test_a_path_that_a_shell_would_change_is_refused_on_a_command_line(
    export, corpus, tmp_path, folder
):
    moved = shutil.copytree(corpus.root, tmp_path / folder)
    with pytest.raises(UserError, match="use --format megatron-per-split"):
        export("megatron-data-path", corpus=moved)


def test_a_path_with_white_space_goes_through_the_json_alone(export, corpus, drawn, tmp_path):
    moved = Corpus.load(shutil.copytree(corpus.root, tmp_path / "my data"))
    with pytest.raises(UserError, match="' ' in a path"):
        export("megatron-data-args", corpus=moved.root)
    loaded = json.loads(export("megatron-per-split", corpus=moved.root))
    assert get_blend_from_list(loaded["train"]) == expected_blend(moved, drawn, "train")


def test_a_path_that_megatron_would_strip_is_refused(export, corpus, tmp_path):
    moved = shutil.copytree(corpus.root, tmp_path / "copy")
    for suffix in (".bin", ".idx", ".xxh3"):
        (moved / "train" / f"news{suffix}").rename(moved / "train" / f"news {suffix}")
    body = json.loads((moved / "corpus.json").read_text())
    body["domains"]["news"]["train"]["prefix"] += " "
    del body["checksum"]
    (moved / "corpus.json").write_text(json.dumps(body))
    with pytest.raises(UserError, match="strips white space"):
        export("megatron-per-split", corpus=moved)


def without_text(corpus, folder, name, splits):
    """A copy of the corpus in ``folder`` (made unless it is there), one domain's splits emptied."""
    if not folder.exists():
        shutil.copytree(corpus.root, folder)
    described = json.loads((folder / "corpus.json").read_text())
    for split in splits:
        part = described["domains"][name][split]
        part["documents"] = part["tokens"] = part["text_bytes"] = 0
        part["block_checksums"] = None
        prefix = folder / part["prefix"]
        prefix.with_name(prefix.name + ".bin").write_bytes(b"")
        # A header, and the one document index that every file has.
        idx = prefix.with_name(prefix.name + ".idx")
        idx.write_bytes(idx.read_bytes()[:18] + bytes(16 + 8))
    described.pop("checksum", None)
    (folder / "corpus.json").write_text(json.dumps(described))
    return folder
