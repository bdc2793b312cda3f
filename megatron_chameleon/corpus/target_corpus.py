"""A corpus in which the texts of a target are held-out domains, for methods that train on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Domain, Stopwatch, provenance
from megatron_chameleon.artifacts.files import sha256_of_json, writing
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.join import link_domains, write_split
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.staging import TOKENS_NAME, corpus_folder
from megatron_chameleon.corpus.target import Target, read_target_text, warn_leaked, warn_short
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError, quoted

FOLDER_NAME = "target-corpus"
# Maximum tokens of a text, which is encoded in memory; of a longer text, documents are sampled.
MAX_TEXT_TOKENS = 1 << 24


def corpus_with_texts(
    corpus: Corpus, target: Target, source: SourceOptions, folder: Path
) -> Corpus:
    """Return ``corpus`` with the texts of ``target`` as held-out domains, written to ``folder``.

    The text becomes the valid split of its domain. The token files of ``corpus`` are linked. A
    folder of an earlier call is reused if the texts are unchanged; shares may change.

    Args:
        corpus: the corpus.
        target: target with texts.
        source: keys and limits of the texts; its inputs are ignored.
        folder: folder to write.

    Raises:
        UserError: if a text or the tokenizer cannot be read, the disk is full, or ``folder`` was
            written for other texts or another corpus.
    """
    settings = sha256_of_json([source.text_key, source.max_document_bytes])
    inputs = {
        "corpus": corpus.hash,
        "target text": target.texts_hash,
        "target text options": settings,
    }
    found = Corpus.load(folder) if Corpus.exists(folder) else None
    if found is None or found.provenance.inputs != inputs:
        stopwatch = Stopwatch()
        with corpus_folder(folder, overwrite=True, shared=False) as opened:
            made = opened.staging / "corpus"
            with writing(made):
                (made / TOKENS_NAME).mkdir(parents=True)
            texts = _write_texts(corpus, target, source, made)
            if found is not None:
                # Files with another time or another folder may hold the same text.
                _check_unchanged(found, corpus, texts)
            else:
                linked = link_domains(corpus, made, corpus.names, corpus.held_out)
                dataclasses.replace(
                    linked,
                    held_out={**linked.held_out, **texts},
                    provenance=provenance(source, inputs),
                    cost=stopwatch.cost(),
                ).save()
                opened.publish(made)
        found = found or Corpus.load(folder)
    _report(found, target)
    return found


def _write_texts(
    corpus: Corpus, target: Target, source: SourceOptions, folder: Path
) -> dict[str, Domain]:
    """Encode each text with the corpus's tokenizer, and write it as a held-out domain."""
    tokenizer, texts = corpus_tokenizer(corpus), dict[str, Domain]()
    for name in sorted(target.texts):  # the order in --target has no effect
        text = read_target_text(source, target, name, tokenizer, MAX_TEXT_TOKENS)
        texts[name] = Domain(
            write_split(name, "train", folder, corpus.dtype),
            write_split(name, "valid", folder, corpus.dtype, text),
            write_split(name, "test", folder, corpus.dtype),
        )
    return texts


def _check_unchanged(found: Corpus, corpus: Corpus, texts: dict[str, Domain]) -> None:
    """Raise UserError unless ``found`` is ``corpus`` with these texts."""
    expected = dataclasses.replace(corpus, held_out={**corpus.held_out, **texts})
    if found.hash == expected.hash:
        return
    what = "another --corpus"
    if found.provenance.inputs.get("corpus") == corpus.hash:
        changed = [
            name
            for name in texts
            if name in found.held_out
            and found.held_out[name].valid.sha256 != texts[name].valid.sha256
        ]
        what = f"another text of {quoted(changed)}" if changed else "other texts of --target"
    raise UserError(
        f"{found.root} was written for {what}, and runs may have been measured on it; restore it, "
        "or choose another --work-dir"
    )


def _report(corpus: Corpus, target: Target) -> None:
    """Print the size of each text; warn about short texts, and documents of the training text."""
    trained = [name for name, tokens in corpus.train_tokens.items() if tokens]
    domains = open_domains(corpus)
    for name in target.texts:
        text, size = domains.open(name, "valid"), corpus.held_out[name].valid
        warn_short(name, text)
        leaked = warn_leaked(name, text, trained, domains.open, corpus.tokenizer.eod_id)
        where = "" if leaked else "; none of them was found in the training text"
        print(
            f"target text '{name}': {size.documents:,} documents, {size.tokens:,} tokens{where}",
            flush=True,
        )
