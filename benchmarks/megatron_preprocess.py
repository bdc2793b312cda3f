"""The algorithm of Megatron-LM's tools/preprocess_data.py, the baseline of data.py.

One process per core parses lines, encodes each document separately with the tokenizers library and
appends the end-of-document token; the main process passes the results, 32 lines at a time, to
megatron.core's own builder. Arguments, sentence splitting and progress output are omitted.

    python benchmarks/megatron_preprocess.py INPUT.jsonl TOKENIZER.json OUTPUT_PREFIX WORKERS
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings

import tokenizers

EOD_TOKEN = "<|endoftext|>"
LINES_AT_ONCE = 32


class Encoder:
    """Encodes documents in a worker process, which opens the tokenizer once."""

    tokenizer: tokenizers.Tokenizer
    eod_id: int

    def __init__(self, tokenizer_file: str) -> None:
        self.tokenizer_file = tokenizer_file

    def open(self) -> None:
        """Open the tokenizer; special tokens in the text are encoded as text."""
        Encoder.tokenizer = tokenizers.Tokenizer.from_file(self.tokenizer_file)
        Encoder.tokenizer.encode_special_tokens = True
        eod_id = Encoder.tokenizer.token_to_id(EOD_TOKEN)
        assert eod_id is not None
        Encoder.eod_id = eod_id

    def encode(self, line: str) -> list[int]:
        """The tokens of the document in ``line``, with the end-of-document token."""
        text = json.loads(line)["text"]
        ids: list[int] = Encoder.tokenizer.encode(text, add_special_tokens=False).ids
        ids.append(Encoder.eod_id)
        return ids


def main() -> None:
    """Write OUTPUT_PREFIX.bin and .idx."""
    input_file, tokenizer_file, output_prefix, workers = sys.argv[1:]
    warnings.filterwarnings("ignore", message=".*not installed.*")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = Encoder(tokenizer_file)
    encoder.open()
    vocab_size = Encoder.tokenizer.get_vocab_size()
    builder = IndexedDatasetBuilder(f"{output_prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    with (
        open(input_file, encoding="utf-8") as lines,
        multiprocessing.Pool(int(workers), initializer=encoder.open) as pool,
    ):
        for ids in pool.imap(encoder.encode, lines, LINES_AT_ONCE):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{output_prefix}.idx")


if __name__ == "__main__":
    main()
