"""Exports read by Megatron's own code."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from megatron_chameleon.artifacts import SPLITS, Corpus, DomainSource, Mixture, MixtureWarning
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import write_blend, write_mixture
from tests.unit.blend.inputs import dataset_config


def expected_blend(corpus, sampled, split):
    """The prefixes and the exact weights that Megatron should read."""
    return [str(corpus.prefix(name, split)) for name in sampled], list(sampled.values())


@pytest.mark.parametrize("split", SPLITS)
def test_megatron_reads_data_path_and_data_args(export, corpus, sampled, split):
    line = export("megatron-data-path", split=split)
    assert line.count("\n") == 1
    expected = expected_blend(corpus, sampled, split)
    assert get_blend_from_list(line.split()) == expected
    path = DataPath.parse(line)
    assert (list(path.prefixes), list(path.weights or ())) == expected
    text = export("megatron-data-args", split=split)
    assert text.count("\n") == len(sampled)
    # Megatron-LM reads the whole file and splits it at white space.
    assert get_blend_from_list(text.split()) == expected


def test_megatron_reads_every_split(export, corpus, sampled):
    expected = {split: expected_blend(corpus, sampled, split) for split in SPLITS}
    loaded = json.loads(export("megatron-per-split"))
    assert {split: get_blend_from_list(blend) for split, blend in loaded.items()} == expected
    arguments = json.loads(export("megatron-bridge"))
    # Megatron Bridge's GPTDatasetConfig derives from this class and runs its checks.
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=16, **arguments)
    assert not config.mock
    assert list(map(tuple, config.blend_per_split)) == list(expected.values())


@pytest.fixture
def built(corpus, one_rank, tmp_path):
    """``built(arguments, num_samples)`` builds train, valid and test with Megatron's builder."""

    def build(arguments, num_samples):
        cache = str(tmp_path / "cache")
        more = {"random_seed": 11, "sequence_length": 16, "path_to_cache": cache, **arguments}
        config = dataset_config(corpus.tokenizer, **more)
        sizes = [num_samples] * 3
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

    return build


def sampled_shares(dataset):
    assert isinstance(dataset, BlendedDataset)
    domains = [int(dataset[index]["dataset_id"]) for index in range(len(dataset))]
    return [domains.count(number) / len(domains) for number in range(len(dataset.datasets))]


def test_megatron_samples_with_the_exported_weights(export, corpus, sampled, built):
    datasets = built(json.loads(export("megatron-bridge")), 300)
    for split, dataset in zip(SPLITS, datasets, strict=True):
        paths = [part.dataset.path_prefix for part in dataset.datasets]
        assert paths == [str(corpus.prefix(name, split)) for name in sampled]
        # Megatron's blend is within one sample of the weights.
        assert sampled_shares(dataset) == pytest.approx(list(sampled.values()), abs=1 / 300)


def test_weight_of_a_domain_without_validation_text_goes_to_the_others(
    export, corpus, sampled, built, tmp_path
):
    copy = without_text(corpus, tmp_path / "copy", "code", "valid")
    with pytest.warns(MixtureWarning, match="no valid tokens of code"):
        arguments = json.loads(export("megatron-bridge", corpus=copy))
    train, valid, test = (dict(zip(*blend, strict=True)) for blend in arguments["blend_per_split"])
    assert len(train) == len(test) == len(sampled) == len(valid) + 1
    assert sum(valid.values()) == pytest.approx(1, abs=1e-15)
    rest = sampled["news"] / (1 - sampled["code"])
    assert sampled_shares(built(arguments, 300)[1])[0] == pytest.approx(rest, abs=1 / 300)


def test_a_split_without_text_is_exported_as_null(export, corpus, tmp_path):
    copy = tmp_path / "copy"
    for name in corpus.names:
        without_text(corpus, copy, name, "test")
    with pytest.warns(MixtureWarning, match="no test tokens"):
        loaded = json.loads(export("megatron-per-split", corpus=copy))
    assert get_blend_from_list(loaded["test"]) is None
    with pytest.warns(MixtureWarning), pytest.raises(UserError, match="test tokens"):
        export("megatron-data-path", corpus=copy, split="test")
    without_text(corpus, copy, "news", "train")
    with pytest.raises(UserError, match="'news'"):
        export("megatron-data-path", corpus=copy)


def test_path_that_a_format_would_change_is_rejected(export, corpus, sampled, tmp_path):
    for folder in ("my data", "a*b", "cost$", "it's"):
        moved = Corpus.load(shutil.copytree(corpus.root, tmp_path / folder))
        with pytest.raises(UserError, match="megatron-per-split"):
            export("megatron-data-path", corpus=moved.root)
        loaded = json.loads(export("megatron-per-split", corpus=moved.root))
        assert get_blend_from_list(loaded["train"]) == expected_blend(moved, sampled, "train")
    with pytest.raises(UserError, match="' ' in a path"):
        export("megatron-data-args", corpus=tmp_path / "my data")


def test_path_that_megatron_would_strip_is_rejected():
    source = DomainSource({split: ["/news .bin"] for split in SPLITS}, dict.fromkeys(SPLITS, 5))
    with pytest.raises(UserError, match="white space"):
        write_mixture(Mixture({"news": 1.0}, sources={"news": source}), "megatron-per-split")


def without_text(corpus, folder, name, split):
    """Copy ``corpus`` to ``folder`` unless it exists, and empty a split of domain ``name``."""
    if not folder.exists():
        shutil.copytree(corpus.root, folder)
    described = Corpus.load(folder)
    domain, prefix = described.domains[name], described.prefix(name, split)
    Path(f"{prefix}.bin").write_bytes(b"")
    # The file has only a header and the one document index that even an empty file has.
    index = Path(f"{prefix}.idx")
    index.write_bytes(index.read_bytes()[:18] + bytes(16 + 8))
    empty = dataclasses.replace(
        domain.split(split), documents=0, tokens=0, text_bytes=0, block_checksums=None
    )
    changed: dict[str, Any] = {split: empty}
    domains = {**described.domains, name: dataclasses.replace(domain, **changed)}
    dataclasses.replace(described, domains=domains).save()
    return folder


def test_a_computed_mixture_is_written_as_a_blend_whose_arguments_survive_a_shell(
    export, corpus, sampled, mixture_file, tmp_path
):
    moved = Corpus.load(shutil.copytree(corpus.root, tmp_path / "it's (my) & $data"))
    (tmp_path / "m.data-args.txt").write_text("of an earlier mixture")
    lines = write_blend(tmp_path / "m.json", Mixture.load(mixture_file), moved)
    bridge = export("megatron-bridge", corpus=moved.root)
    assert (tmp_path / "m.bridge.json").read_text() == bridge
    words = shlex.split(lines[1].partition("--data-path")[2])
    assert words[-2:] == ["--split", "100,0,0"]
    assert get_blend_from_list(words[:-2]) == expected_blend(moved, sampled, "train")
    assert not (tmp_path / "m.data-args.txt").exists()


def test_long_arguments_are_written_to_a_file(tmp_path):
    many = {f"d{number}": 1 / 1000 for number in range(1000)}
    lines = write_blend(tmp_path / "m.json", Mixture(many), None)
    assert sum(map(len, lines)) < 1000
    content = (tmp_path / "m.data-args.txt").read_text().split()
    assert dict(zip(content[1::2], map(float, content[::2]), strict=True)) == many
