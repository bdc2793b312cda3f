"""Draw by an export with litdata: python litdata_reads.py EXPORT FOLDER SEQUENCE_LENGTH.

FOLDER/NAME.json are the token ids of each domain.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import torch
from litdata import CombinedStreamingDataset, StreamingDataset, TokensLoader, optimize

SAMPLES = 2000


def tokens_of(folder: str, name: str) -> torch.Tensor:
    """All token ids of one domain."""
    return torch.tensor(json.loads((Path(folder) / f"{name}.json").read_text()))


def chunks(folder: str, name: str, sequence_length: int) -> StreamingDataset:
    """The domain in litdata's own chunks, written and opened."""
    loader = TokensLoader(block_size=sequence_length)  # one each: it knows its data set's chunks
    output = str(Path(folder) / "chunks" / name)
    optimize(
        partial(tokens_of, folder),
        [name],
        output_dir=output,
        chunk_bytes="1MB",
        item_loader=loader,
        num_workers=1,
        verbose=False,
    )
    return StreamingDataset(output, item_loader=loader, shuffle=True)


def main(export: str, folder: str, sequence_length: int) -> None:
    """Write the samples to FOLDER/samples.json."""
    arguments = json.loads(Path(export).read_text())
    names = arguments["datasets"]
    arguments["datasets"] = [chunks(folder, name, sequence_length) for name in names]
    combined = CombinedStreamingDataset(**arguments)
    samples = [sample.tolist() for sample in itertools.islice(combined, SAMPLES)]
    (Path(folder) / "samples.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
