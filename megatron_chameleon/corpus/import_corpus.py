"""import_corpus: a corpus.json over existing Megatron .bin/.idx files, or over those of a corpus.

Of each imported .bin, only blocks are read, for its identity and to check its token ids.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Domain,
    DomainSplit,
    ImportedFile,
    Mixture,
    Provenance,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.corpus import hash_range, hash_token_file, table_label
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.data_path import (
    DataPath,
    sequence_range,
    split_range,
    split_ranges,
)
from megatron_chameleon.corpus.indexed import TokenFile, open_token_file, require_token_type
from megatron_chameleon.corpus.join import link_domains
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.corpus.repeats import find_repeats, format_repeats, require_minhash
from megatron_chameleon.corpus.staging import TOKENS_NAME, WEIGHTS_NAME, corpus_folder
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar
from megatron_chameleon.storage import absolute, file_state, location, reading

# Blocks of each .bin whose token ids are checked, and documents whose last token is checked.
_SAMPLED_BLOCKS, _SAMPLED_DOCUMENTS = 64, 16


def import_corpus(options: ImportOptions) -> None:
    """Describe existing .bin/.idx files in a corpus.json, and print a table.

    Raises:
        UserError: for a mistake in the options or in the files; nothing is written then.
    """
    if options.corpus is not None:
        hold_out(options, Corpus.load(options.corpus))
        return
    stopwatch = Stopwatch()
    if options.find_repeats == "near":
        require_minhash()
    path = DataPath.read(options.data_path, options.data_args_path)
    assert options.tokenizer_model is not None
    tokenizer = load_tokenizer(options.tokenizer_model, options.eod_token, options.tiktoken_pattern)
    weights = path.weights or (1.0,)
    if min(weights) < 0 or not 0 < math.fsum(weights) < math.inf:
        raise UserError("the weights of the prefixes must be >= 0, and their sum finite and > 0")
    held_out = _held_out_names(options, path.names)
    for name, weight in zip(path.names, path.weights or (), strict=False):
        if name in held_out and weight:
            raise UserError(
                f"--held-out {options.held_out}: '{name}' has the weight {weight:g} in the "
                "--data-path; change it to 0"
            )
    _check_outside_output(path.prefixes, options.output)

    def read(prefix: str, name: str) -> _Import:
        return import_file(prefix, options.split, tokenizer, held_out=name in held_out)

    with (
        corpus_folder(options.output, options.overwrite, shared=False) as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        progress_bar(len(path.prefixes), " files", "reading", delay=SECONDS_WITHOUT_BAR) as bar,
    ):
        found: dict[str, _Import] = {}
        imports = pool.map(read, path.prefixes, path.names)
        for name, file in zip(path.names, imports, strict=True):
            found[name] = file
            bar.update()
        made = folder.staging / "corpus"
        with writing(made):
            made.mkdir()
        tokenizer.save(made)
        corpus = Corpus(
            root=made,
            tokenizer=tokenizer.identity,
            dtype="int32" if any(file.dtype == "int32" for file in found.values()) else "uint16",
            domains={n: file.domain for n, file in found.items() if n not in held_out},
            provenance=provenance(options, {}),
            cost=stopwatch.cost(),
            held_out={n: file.domain for n, file in found.items() if n in held_out},
        )
        if options.find_repeats is not None:
            near = options.find_repeats == "near"
            repeats = find_repeats(corpus, near=near, folder=folder.staging)
            corpus = dataclasses.replace(corpus, repeats=repeats, cost=stopwatch.cost())
        corpus.save()
        if path.weights is not None:
            total, by_name = math.fsum(weights), dict(zip(path.names, weights, strict=True))
            mixture = Mixture(
                {name: by_name[name] / total for name in corpus.names},
                method="data-path",
                provenance=corpus.provenance,
            )
            mixture.save(made / WEIGHTS_NAME)
        folder.publish(made)
    _warn(found, tokenizer.eod_token)
    print(_summary(corpus, options, has_weights=path.weights is not None))


def hold_out(options: ImportOptions, corpus: Corpus) -> None:
    """Write a corpus with the domains of ``corpus``, some of them held out, and print a table.

    Raises:
        UserError: for a mistake in the options, or if the disk is full.
    """
    names = _held_out_names(options, corpus.names)
    if options.output.resolve() == corpus.root.resolve():
        raise UserError(f"--output {options.output} is --corpus; choose another folder")
    train = [name for name in corpus.names if name not in names]
    held_out = [*corpus.held_out, *names]
    made_by = provenance(options, {"corpus": corpus.hash})
    new = link_corpus(corpus, options.output, train, held_out, made_by, options.overwrite)
    print(_summary(new, options, has_weights=False))


def link_corpus(
    corpus: Corpus,
    output: Path,
    train: Sequence[str],
    held_out: Sequence[str],
    made_by: Provenance,
    overwrite: bool = False,
) -> Corpus:
    """Write a corpus of some domains of ``corpus``, whose token files it links.

    Args:
        corpus: the existing corpus.
        output: folder of the new corpus.
        train: domains to train on.
        held_out: domains that are held out.
        made_by: provenance of the new corpus.
        overwrite: whether ``output`` may hold a corpus already.

    Raises:
        UserError: if ``output`` cannot be written, or holds token files of ``corpus``.
    """
    stopwatch = Stopwatch()
    prefixes = [str(corpus.prefix(n, split)) for n in corpus.all_domains for split in SPLITS]
    _check_outside_output(prefixes, output)
    with corpus_folder(output, overwrite, shared=False) as folder:
        linked = link_domains(corpus, folder.staging / "corpus", train, held_out)
        new = dataclasses.replace(linked, provenance=made_by, cost=stopwatch.cost())
        new.save()
        folder.publish(new.root)
    return dataclasses.replace(new, root=output)


def _held_out_names(options: ImportOptions, names: Iterable[str]) -> list[str]:
    """Return the domains of ``--held-out``, in the order of ``names``.

    Raises:
        UserError: for an unknown name, or if no domain is left to train on.
    """
    if options.held_out is None:
        return []
    wanted = {name.strip() for name in options.held_out.split(",")}
    known = list(names)
    if unknown := wanted.difference(known):
        raise UserError(
            f"--held-out {options.held_out}: no domain to train on is called '{min(unknown)}'; "
            f"choose from {quoted(known)}"
        )
    if wanted.issuperset(known):
        raise UserError(f"--held-out {options.held_out} leaves no domain to train on")
    return [name for name in known if name in wanted]


def _check_outside_output(prefixes: Iterable[str], output: Path) -> None:
    """Raise UserError for a token file that writing the corpus would replace."""
    tokens = (output / TOKENS_NAME).resolve()
    for prefix in prefixes:
        if Path(prefix).resolve().parent == tokens:
            raise UserError(
                f"{prefix} is in --output {output}, whose token files are replaced; choose another "
                "--output"
            )


@dataclasses.dataclass(frozen=True)
class _Import:
    """An imported file.

    Attributes:
        domain: its record in corpus.json.
        dtype: type of a token.
        has_documents: whether the .idx divides the sequences into documents.
        ends_documents: whether any sampled document ends with the end-of-document token.
    """

    domain: Domain
    dtype: str
    has_documents: bool
    ends_documents: bool


def import_file(
    prefix: str, split: str, tokenizer: Tokenizer, *, held_out: bool = False
) -> _Import:
    """Read the .idx of a pair of files, and check a sample of the tokens.

    Args:
        prefix: path or URL of the files, without suffix.
        split: Megatron's ``--split``.
        tokenizer: the tokenizer that made the tokens.
        held_out: whether the share of train is 0, so that valid and test share all sequences.

    Raises:
        UserError: for damaged files, a split without tokens, or ids outside the vocabulary.
    """
    prefix = absolute(prefix)
    if held_out:
        split_range(split, "valid")  # raises if nothing is left
        split = ",".join(["0", *split.split(",")[1:]])
    file = open_token_file(location(prefix), vocab_size=tokenizer.vocab_size)
    require_token_type(file)
    sha256 = hash_token_file(location(prefix))
    splits = []
    for name, bounds in split_ranges(split).items():
        first, stop = (0, 0) if bounds is None else sequence_range(len(file), bounds)
        tokens = file.num_tokens(first, stop)
        if not tokens and (bounds is not None or (name == "train" and not held_out)):
            raise UserError(
                f"{prefix}.idx: --split {split} leaves no tokens for {name}, of {len(file)} "
                f"sequences; raise the share of {name} (80,10,10), or merge the file with others"
            )
        splits.append(
            DomainSplit(
                prefix=prefix,
                documents=len(file.documents(first, stop)),
                tokens=tokens,
                text_bytes=None,
                sha256=hash_range(sha256, first, stop),
                sequences=(first, stop),
            )
        )
    # Reading a token checks its whole block.
    file.tokens[np.linspace(0, file.tokens.size - 1, _SAMPLED_BLOCKS).astype(np.int64)]
    bin_bytes = file.tokens.size * file.dtype.itemsize
    with reading(f"{prefix}.idx", "restore it"):
        idx_bytes = file_state(f"{prefix}.idx").bytes
    imported = ImportedFile(split, bin_bytes, idx_bytes, sha256)
    ends = _ends_documents(file, tokenizer.eod_id)
    domain = Domain(*splits, imported=imported)
    return _Import(domain, file.dtype.name, file.has_documents, ends)


def _ends_documents(file: TokenFile, eod_id: int) -> bool:
    """Whether any sampled document, or sequence of a file without documents, ends with eod_id."""
    documents = file.documents(0, len(file))
    some = np.linspace(0, len(documents) - 1, _SAMPLED_DOCUMENTS).astype(np.int64)
    starts, lengths = documents.pointers[some] // file.dtype.itemsize, documents.lengths[some]
    return bool((file.tokens[(starts + lengths)[lengths > 0] - 1] == eod_id).any())


def _warn(found: dict[str, _Import], eod_token: str) -> None:
    """Warn about files without document boundaries or end-of-document tokens."""
    if whole := [name for name, file in found.items() if not file.has_documents]:
        warnings.warn(
            f"no document boundaries in {quoted(whole)}: every sequence counts as a document",
            stacklevel=2,
        )
    if endless := [name for name, file in found.items() if not file.ends_documents]:
        warnings.warn(
            f"no sampled document of {quoted(endless)} ends with {eod_token}: check "
            "--tokenizer-model and --eod-token, unless the text was preprocessed without "
            "--append-eod",
            stacklevel=2,
        )


def _summary(corpus: Corpus, options: ImportOptions, *, has_weights: bool) -> str:
    """Format documents and tokens of each domain, the output and the next commands."""
    import pandas as pd

    rows = [
        {
            "documents": sum(domain.split(split).documents for split in SPLITS),
            **{f"{split} tokens": domain.split(split).tokens for split in SPLITS},
        }
        for domain in corpus.all_domains.values()
    ]
    labels = [table_label(name, corpus.held_out) for name in corpus.all_domains]
    table = pd.DataFrame(rows, labels)
    table.loc["total"] = table.sum()
    folder = shlex.quote(str(options.output))
    mixture = f"{folder}/{WEIGHTS_NAME}" if has_weights else "uniform"
    files = "the .bin and .idx files stay where they are"
    if options.corpus is not None:
        files = f"its token files are those of {options.corpus}"
    lines = [
        table.to_string(formatters=dict.fromkeys(table.columns, "{:,}".format)),
        *([format_repeats(corpus)] if corpus.repeats else []),
        f"wrote {options.output}; {files}",
    ]
    if has_weights:
        lines.append(f"the weights of --data-path are in {mixture}, a mixture")
    lines += [
        f"next: megatron-chameleon pretrain_gpt --corpus {folder} --run-dir RUN --model MODEL "
        f"--mixture {mixture}",
        f"or:   megatron-chameleon compute_mixture --corpus {folder} "
        "--checkpoint RUN_OR_HUGGING_FACE_FOLDER --output MIXTURE.json",
    ]
    return "\n".join(lines)
