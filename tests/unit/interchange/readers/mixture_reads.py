"""Print what a trainer reads from a mixture, as JSON: python mixture_reads.py FORMAT FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def litgpt(path: Path) -> Any:
    """Names, and weights of litdata's CombinedStreamingDataset."""
    from litdata import CombinedStreamingDataset, StreamingDataset
    from litdata.streaming import Cache

    arguments = json.loads(path.read_text())
    names = arguments["datasets"]
    for number in range(len(names)):
        cache = Cache(str(path.parent / f"chunks{number}"), chunk_size=64)
        for item in range(64):
            cache[item] = number
        cache.done()
        cache.merge()
    arguments["datasets"] = [
        StreamingDataset(str(path.parent / f"chunks{number}")) for number in range(len(names))
    ]
    dataset = CombinedStreamingDataset(**arguments)
    assert set(dataset) <= set(range(len(names)))
    return dict(zip(names, dataset._weights, strict=True))


def torchtitan(path: Path) -> Any:
    """Names and weights of the sources of torchtitan's interleaved data loader."""
    from torchtitan.hf_datasets.text_datasets import (
        HFDataSource,
        InterleavedHuggingFaceTextDataLoader,
    )

    listed = json.loads(path.read_text())["sources"]
    sources = [HFDataSource(**source) for source in listed]
    config = InterleavedHuggingFaceTextDataLoader.Config(sources=sources)
    return {source.dataset: source.weight for source in config.sources}


def automodel(path: Path) -> Any:
    """Prefixes and weights of the splits of Automodel's MegatronPretraining."""
    from nemo_automodel.components.datasets.llm.megatron.megatron_utils import get_blend_from_list
    from nemo_automodel.components.datasets.llm.megatron_dataset import try_load_blend_from_json

    paths = try_load_blend_from_json(path)
    return {split: get_blend_from_list(listed) for split, listed in paths.items()}


if __name__ == "__main__":
    reader = {"litgpt": litgpt, "torchtitan": torchtitan, "automodel": automodel}[sys.argv[1]]
    print(json.dumps(reader(Path(sys.argv[2]))))
