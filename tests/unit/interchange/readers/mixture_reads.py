"""Print what a trainer reads from a mixture, as JSON: python mixture_reads.py FORMAT FILE."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


def litgpt(path: Path) -> Any:
    """Names, and weights of litdata's CombinedStreamingDataset."""
    from litdata import CombinedStreamingDataset, StreamingDataset
    from litdata.streaming import Cache

    arguments = json.loads(path.read_text())
    names = arguments["datasets"]
    for number in range(len(names)):
        cache = Cache(str(path.parent / f"chunks{number}"), chunk_size=64)
        for item in range(4096):
            cache[item] = number
        cache.done()
        cache.merge()
    arguments["datasets"] = [
        StreamingDataset(str(path.parent / f"chunks{number}")) for number in range(len(names))
    ]
    dataset = CombinedStreamingDataset(**arguments)
    sampled = [int(number) for number in itertools.islice(dataset, 2000)]
    assert_sampled(sampled, dataset._weights)
    return dict(zip(names, dataset._weights, strict=True))


def torchtitan(path: Path) -> Any:
    """Names and weights of the sources of torchtitan's interleaved data loader, which is built."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import (
        DATASETS,
        HFDataSource,
        InterleavedHuggingFaceTextDataLoader,
    )

    def encode(text: str, **_: bool) -> list[int]:
        return [int(text)] * 64

    listed = json.loads(path.read_text())["sources"]
    for number, source in enumerate(listed):
        rows = Dataset.from_list([{"text": str(number)}] * 100)
        DATASETS[source["dataset"]] = DatasetConfig(
            path="none", loader=lambda _, rows=rows: rows, sample_processor=lambda row: row["text"]
        )
    sources = [HFDataSource(**source) for source in listed]
    loader = InterleavedHuggingFaceTextDataLoader(
        InterleavedHuggingFaceTextDataLoader.Config(sources=sources),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=SimpleNamespace(encode=encode),
        seq_len=32,
        local_batch_size=4,
    )
    batches = itertools.islice(loader, 500)
    sampled = [number for _, labels in batches for number in labels[:, 0].tolist()]
    assert_sampled(sampled, [source.weight for source in sources])
    return {source.dataset: source.weight for source in sources}


def assert_sampled(sampled: list[int], weights: list[float]) -> None:
    """Check that independent samples have the numbers 0, 1, ... with ``weights``."""
    for number, weight in enumerate(weights):
        deviation = math.sqrt(weight * (1 - weight) / len(sampled))
        assert abs(sampled.count(number) / len(sampled) - weight) < 5 * deviation


def automodel(path: Path) -> Any:
    """Prefixes and weights of the splits of Automodel's MegatronPretraining, which is built."""
    import torch
    from nemo_automodel.components.datasets.llm.megatron_dataset import MegatronPretraining

    rendezvous = f"file://{path.parent / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    built = MegatronPretraining(
        paths=path,
        seq_length=32,
        tokenizer=SimpleNamespace(name_or_path="none", pad_token_id=None, eos_token_id=250),
        index_mapping_dir=str(path.parent / "indices"),
        num_train_samples=1000,
        num_val_samples=100,
        num_test_samples=100,
    )
    built.build()
    splits = ("train", "validation", "test")
    blends = dict(zip(splits, built.build_kwargs["blend_per_split"], strict=True))
    for split, (prefixes, weights) in blends.items():
        dataset = built.get_dataset(split)
        assert [part.dataset.path_prefix for part in dataset.datasets] == prefixes
        counts = Counter(dataset.dataset_index[: len(dataset)].tolist())
        for number, weight in enumerate(weights):
            assert abs(counts[number] - weight * len(dataset)) < 1
        assert len(dataset[0]["input_ids"]) == 32
    return blends


class TransformerEngine(MetaPathFinder, Loader):
    """Imports placeholders for Transformer Engine's modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find ``transformer_engine`` and its submodules."""
        if fullname.partition(".")[0] != "transformer_engine":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        """Return a module that has every attribute."""
        return MagicMock(__version__="2.10.0")

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module is complete."""


def megatron_bridge(path: Path) -> Any:
    """Prefixes and weights of the splits of Megatron Bridge's GPTDatasetConfig.

    Megatron Bridge imports Transformer Engine, which needs a GPU; its data configuration does not
    use it.
    """
    sys.meta_path.append(TransformerEngine())
    from megatron.bridge.training.config import GPTDatasetConfig

    config = GPTDatasetConfig(
        seq_length=32,
        random_seed=1,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=None,
        **json.loads(path.read_text()),
    )
    config.finalize()
    return dict(zip(("train", "validation", "test"), config.blend_per_split, strict=True))


if __name__ == "__main__":
    reader = {
        "litgpt": litgpt,
        "torchtitan": torchtitan,
        "automodel": automodel,
        "megatron-bridge": megatron_bridge,
    }[sys.argv[1]]
    print(json.dumps(reader(Path(sys.argv[2]))))
