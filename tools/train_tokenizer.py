"""Train a byte-level BPE or SentencePiece tokenizer."""

from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.tokenizer_training import train_tokenizer
from megatron_chameleon.options.tokenizer import TrainTokenizerOptions

if __name__ == "__main__":
    run_tool(train_tokenizer, TrainTokenizerOptions)
