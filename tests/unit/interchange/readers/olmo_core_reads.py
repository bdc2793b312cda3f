"""Sample from an export with OLMo-core: python olmo_core_reads.py EXPORT FOLDER SEQ_LENGTH."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from olmo_core.data import NumpyDatasetDType, TokenizerConfig
from olmo_core.data.numpy_dataset import NumpyFSLDatasetConfig
from olmo_core.data.source_mixture import SourceMixtureDatasetConfig, SourceMixtureList


def main(export: str, folder: str, sequence_length: int) -> None:
    """Write samples to FOLDER/samples.json, as many as FOLDER/token_budget.json allows."""
    requested = json.loads((Path(folder) / "token_budget.json").read_text())
    mixture = SourceMixtureDatasetConfig(
        source_list=SourceMixtureList.from_yaml(export),
        requested_tokens=requested,
        global_batch_size=4 * sequence_length,
        render_tables=False,
        quiet=True,
    )
    dataset = NumpyFSLDatasetConfig.from_src_mix(
        mixture,
        sequence_length=sequence_length,
        tokenizer=TokenizerConfig(vocab_size=251, eos_token_id=250, pad_token_id=250),
        dtype=NumpyDatasetDType.uint16,
        work_dir=folder,
    ).build()
    dataset.prepare()
    samples = [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
    (Path(folder) / "samples.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
