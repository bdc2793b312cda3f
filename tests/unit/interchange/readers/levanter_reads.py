"""Print what levanter reads from a mixture, as JSON: python levanter_reads.py FILE BLOCK BLOCKS.

The output has the weights of its data configuration, and how often its MixtureDataset samples each
component within the first BLOCKS blocks of BLOCK sequences.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import draccus
import yaml
from levanter.data import ListAsyncDataset, MixtureDataset
from levanter.data.text import LmDataConfig

if __name__ == "__main__":
    body = yaml.safe_load(Path(sys.argv[1]).read_text())
    block, blocks = map(int, sys.argv[2:])
    weights = body["train_weights"]
    names = weights if isinstance(weights, dict) else weights[0][1]
    fixed = {"tokenizer": "passthrough", "vocab_size": 251, "components": {n: {} for n in names}}
    config = draccus.decode(LmDataConfig, {**fixed, **body})
    components = {name: ListAsyncDataset([name]) for name in names}
    mixture = MixtureDataset(components, config.train_weights, block, key=0)
    counts = Counter(asyncio.run(mixture.get_batch(range(block * blocks))))
    print(json.dumps({"weights": config.train_weights, "counts": counts}))
