"""Turn text into a corpus of Megatron .bin/.idx files."""

from megatron_chameleon.cli import run_tool
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.options.preprocess import PreprocessOptions

if __name__ == "__main__":
    run_tool(preprocess_data, PreprocessOptions)
