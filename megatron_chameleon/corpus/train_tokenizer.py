"""Train a tokenizer: byte-level BPE, or SentencePiece BPE with byte fallback."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator

import sentencepiece
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megatron_chameleon.artifacts.files import replacing, require_new
from megatron_chameleon.corpus.options import TrainTokenizerOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError, one_line
from megatron_chameleon.progress import progress_bar

# SentencePiece writes its number of threads into the model. The number is constant, so that the
# file does not depend on the machine.
_SENTENCEPIECE_THREADS = 4
_LONGEST_LINE = 1 << 20


def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Train a tokenizer on the documents of ``options.source`` and write it.

    Raises:
        UserError: if the text cannot be read or is too small for the vocabulary.
    """
    output, vocab_size = options.output, options.vocab_size
    train = byte_level_bpe if output.suffix == ".json" else sentencepiece_bpe
    if not options.overwrite:
        require_new([output], "choose another --output or pass --overwrite")
    sources = find_sources(options.source)
    with progress_bar(sum(source.bytes for source in sources), "B", "reading") as bar:
        reader = DocumentReader(options.source, sources, on_bytes=bar.update)

        def texts() -> Iterator[str]:
            any_text = False
            for number in range(len(sources)):
                for document in reader.read(Chunk(number)):
                    any_text = any_text or bool(document.text)
                    yield document.text
            if not any_text:
                raise UserError("--input holds no text to train on")
            bar.set_description("merging")

        model = train(texts(), vocab_size, options.eod_token)
    reader.malformed.check(options.source.max_malformed_share)
    with replacing(output) as temporary:
        temporary.write_bytes(model)
    tokenizer = load_tokenizer(output, options.eod_token)
    if tokenizer.vocab_size < vocab_size:
        warnings.warn(
            f"the text is too small for {vocab_size} entries: the vocabulary has "
            f"{tokenizer.vocab_size}",
            stacklevel=2,
        )
    print(
        f"{output}: {tokenizer.vocab_size} entries, sha256 {tokenizer.sha256[:12]}\n"
        f"next: megatron-chameleon preprocess_data --tokenizer-model {output} "
        "--input NAME=PATH ... --output CORPUS"
    )


def byte_level_bpe(texts: Iterator[str], vocab_size: int, eod_token: str) -> bytes:
    """Train a lossless byte-level BPE tokenizer.json that splits text into words as GPT-2 does."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod_token],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True)).encode("utf-8")


def sentencepiece_bpe(texts: Iterator[str], vocab_size: int, eod_token: str) -> bytes:
    """Train a SentencePiece BPE .model that encodes rare characters as bytes and keeps white space.

    Raises:
        UserError: if the text is too small for the vocabulary.
    """
    model = io.BytesIO()
    lines = (line[:_LONGEST_LINE] for text in texts for line in text.splitlines() if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            control_symbols=[eod_token],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=4 * _LONGEST_LINE,
            num_threads=_SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"SentencePiece cannot train --vocab-size {vocab_size} on this text: {one_line(error)}"
        ) from error
    return model.getvalue()
