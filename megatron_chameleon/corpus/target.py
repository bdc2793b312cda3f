"""``--target``: the text that a mixture is for, and reading it."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import MixtureWarning, TargetShares
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.provenance import without_credentials
from megatron_chameleon.corpus.encode import TextEncoder, encoded_documents
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.options import SourceOptions, is_domain_name
from megatron_chameleon.corpus.sample import read_documents, sample_documents
from megatron_chameleon.corpus.sources import Source, find_sources, source_identity
from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.ranges import CheckedOptions
from megatron_chameleon.storage import is_remote

SYNTAX = "a,b or a=2,b=1 with shares, or NAME=PATH or NAME=PATH=2 for a text"
# Documents in a sample of raw text, at least, and characters that are read for each token.
SAMPLED_DOCUMENTS, CHARACTERS_PER_TOKEN = 256, 5
# MixMin requires so many tokens of each part of a target: two of its smallest blocks of documents.
# The loss of a shorter text is mostly noise.
FEWEST_TARGET_TOKENS = 512
# Options that select the text in the files of --target, of which a command has some.
TEXT_OPTIONS = ("text_key", "max_malformed_share", "max_document_bytes", "target_text_key")
# Documents of a text that are looked up in the training text.
MOST_LOOKED_UP = 2000
# Training documents of these lengths that are read in each domain: seconds, also of large corpora.
MOST_COMPARED = 200_000
# The same while the other ranks wait.
FEW_COMPARED = 5_000
# Training documents whose last token shows whether documents end with a token of their own.
ENDS_READ = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """A parsed ``--target``: texts with shares.

    Attributes:
        value: value of the option; None if the target is the average over the domains.
        shares: name of a domain or of a text -> its share of the target, above 0; sums to 1.
        texts: name -> the files of a text that no domain has.
        reading: values of the options that select the text in these files.
    """

    value: str | None
    shares: Mapping[str, float]
    texts: Mapping[str, Sequence[Source]] = dataclasses.field(default_factory=dict)
    reading: tuple[str | int | None, ...] = ()

    @property
    def record(self) -> TargetShares:
        """Value and shares, as artifacts record them."""
        return TargetShares(self.value, dict(self.shares))

    @property
    def texts_hash(self) -> str:
        """Hex SHA-256 of the identities of the files of all texts, and of how they are read."""
        identities = [
            [name, [source_identity(source) for source in sources]]
            for name, sources in self.texts.items()
        ]
        return sha256_of_json([identities, self.reading])


def average_target(names: Sequence[str]) -> Target:
    """Return the target of equal shares of all domains."""
    return Target(None, dict.fromkeys(names, 1.0 / len(names)))


def recorded_target(parameters: Mapping[str, Any]) -> Target | None:
    """Return the target that a mixture's parameters record; None if they record no shares.

    The average over domains is not a target to select checkpoints by. The shares may be those of
    texts, which are not recorded.
    """
    found = parameters.get("target")
    if not isinstance(found, dict):
        return None
    value, shares = found.get("value"), found.get("shares")
    if not isinstance(value, str) or not isinstance(shares, dict) or not shares:
        return None
    if not all(isinstance(s, int | float) and 0 < s < math.inf for s in shares.values()):
        return None
    total = math.fsum(shares.values())
    named = {name: share / total for name, share in shares.items()}
    return Target(value, named)


def parse_target(
    value: str,
    names: Sequence[str],
    source: SourceOptions,
    match: Callable[[str], str | None] = lambda name: None,
) -> Target:
    """Parse the value of ``--target``, and find the files of its texts without reading them.

    Args:
        value: comma-separated items NAME, NAME=SHARE, NAME=PATH or NAME=PATH=SHARE. A name of a
            domain may contain an equals sign. A number after the last parameter of a URL's query is
            the parameter's value, and a number after that is a share.
        names: domains that may be named.
        source: keys and limits of the texts; its inputs are ignored.
        match: maps another spelling of a name to one of ``names``, or any other text to None.

    Raises:
        UserError: for an unknown or repeated name, a share that is not finite and > 0, or a path
            without readable files.
    """
    shares: dict[str, float] = {}
    texts: dict[str, list[Source]] = {}
    for item in filter(None, map(str.strip, value.split(","))):
        name, share = item, 1.0
        head, equals, number = item.rpartition("=")
        # The path of a text may end with an equals sign and a number, as may a URL: in URL?page=2,
        # the number is no share, but in URL?page=2=3 it is.
        is_path = Path(item.partition("=")[2]).exists() if item.count("=") == 2 else False
        if "?" in head and is_remote(item.partition("=")[2]):  # a glob pattern may have a "?", too
            is_path = bool(re.fullmatch(r"[A-Za-z_][\w-]*=[^=]*", re.split("[?&]", item)[-1]))
        if item not in names and equals and not is_path:
            try:
                name, share = head.strip(), float(number)
            except ValueError:
                name = item
        if not 0 < share < math.inf:
            raise UserError(f"--target {value}: the share of '{name}' must be finite and > 0")
        path, known = "", name if name in names else match(name)
        if known is None:
            name, _, path = name.partition("=")
            if not path:
                raise UserError(
                    f"--target {value}: unknown name '{name}'; pass {SYNTAX}; choose from "
                    f"{quoted(names)}; a task also needs --tasks, which compute_mixture has with "
                    "--method mixmin, regmix, mixing-laws and surrogate"
                )
            if name in names or match(name) is not None or not is_domain_name(name):
                raise UserError(f"--target {value}: '{name}' is a domain; name the text otherwise")
        name = known or name
        if name in shares:
            raise UserError(f"--target {value}: '{name}' is named twice; leave one out")
        shares[name] = share
        if path:
            try:
                texts[name] = find_sources(
                    dataclasses.replace(source, input=((f"{name}={path}",),))
                )
            except UserError as error:
                raise UserError(f"--target: {error}") from error
    if not shares:
        raise UserError(f"--target {value}: names nothing; pass {SYNTAX}")
    total = math.fsum(shares.values())
    reading = (source.text_key, source.max_document_bytes) if texts else ()
    named = {name: share / total for name, share in shares.items()}
    return Target(without_credentials(value), named, texts, reading)


def check_text_options(options: CheckedOptions, target: Target) -> None:
    """Check that options of texts have an effect. Not for options that also apply to --input.

    Raises:
        UserError: if one of ``TEXT_OPTIONS`` is set, and the target has no text.
    """
    if not target.texts:
        fields = [name for name in TEXT_OPTIONS if hasattr(options, name)]
        options.reject_changed(fields, "applies only to texts (NAME=PATH); --target names none")


def read_target_text(
    source: SourceOptions,
    target: Target,
    name: str,
    encoder: TextEncoder,
    max_tokens: int | None,
    seed: int = 0,
) -> TokenFile:
    """Sample documents of a text of ``--target``, about ``max_tokens`` or more, and encode them.

    Args:
        source: keys and limits of the text; its inputs are ignored.
        target: the target that names the text.
        name: name of the text.
        encoder: tokenizer.
        max_tokens: tokens to sample, if the text has as many; None reads all documents.
        seed: seed of the sample.

    Raises:
        UserError: if a file cannot be read or has no text.
    """
    sources = target.texts[name]
    try:
        if max_tokens is None:
            texts = read_documents(source, sources, name)
        else:
            characters = max_tokens * CHARACTERS_PER_TOKEN
            sample = sample_documents(source, sources, name, SAMPLED_DOCUMENTS, characters, seed)
            texts = sample.texts
    except UserError as error:
        raise UserError(f"--target {target.value}: {error}") from error
    return encoded_documents(Path(name), encoder, texts)


def warn_short(name: str, text: TokenFile) -> None:
    """Warn about a text or domain of a target with fewer than ``FEWEST_TARGET_TOKENS`` tokens."""
    tokens = int(text.lengths.sum(dtype=np.int64))
    if tokens < FEWEST_TARGET_TOKENS:
        warnings.warn(
            f"--target: '{name}' has {tokens:,} tokens; the loss of fewer than "
            f"{FEWEST_TARGET_TOKENS:,} is mostly noise, and so is a choice that follows it; add "
            "text",
            MixtureWarning,
            stacklevel=1,  # so that a text that is read twice is reported once
        )


def warn_leaked(
    name: str,
    text: TokenFile,
    domains: Iterable[str],
    open_training: Callable[[str], TokenFile],
    eod_id: int,
    most_compared: int = MOST_COMPARED,
) -> bool:
    """Warn about documents of a target's text that are in the training text of a domain.

    Args:
        name: name of the text.
        text: its documents.
        domains: domains to look them up in.
        open_training: returns the training text of a domain.
        eod_id: the end-of-document token.
        most_compared: training documents that are read in each domain.

    Returns:
        Whether there are any.
    """
    found = False
    for domain in domains:
        leaked, looked_up = count_leaked(text, open_training(domain), eod_id, most_compared)
        if leaked:
            found = True
            warnings.warn(
                f"--target: at least {leaked:,} of {looked_up:,} documents of '{name}' are in the "
                f"training text of '{domain}': what is measured on them is too good; leave them "
                "out of one of the two",
                MixtureWarning,
                stacklevel=1,  # one location, so that a second check repeats no warning
            )
    return found


def warn_same_sources(
    name: str, text: Sequence[Source], domains: Mapping[str, Sequence[Source]]
) -> set[str]:
    """Warn about files of a target's text that are also files of a domain.

    Args:
        name: name of the text.
        text: its files or shards of data sets.
        domains: domain -> its files or shards of data sets.

    Returns:
        The domains that have any.
    """

    def files(sources: Sequence[Source]) -> set[tuple[str, int]]:
        return {(os.path.realpath(source.path), source.shard) for source in sources}

    found = set[str]()
    for domain, sources in domains.items():
        if same := files(text) & files(sources):
            found.add(domain)
            warnings.warn(
                f"--target: {len(same):,} of {len(files(text)):,} files of '{name}' are also files "
                f"of '{domain}', so they are trained on: what is measured on them is too good; "
                "leave them out of one of the two",
                MixtureWarning,
                stacklevel=1,
            )
    return found


def count_leaked(
    target: TokenFile, training: TokenFile, eod_id: int, most_compared: int = MOST_COMPARED
) -> tuple[int, int]:
    """Count documents of a target that occur, token by token, in the training text of a domain.

    Only documents of the same length are compared, and of very many, a part spread evenly. A last
    token ``eod_id`` is ignored, since files that the package did not write may lack it.

    Returns:
        The number of documents that occur, and the number of documents looked up: the longest.
    """
    looked_up = np.argsort(-target.lengths.astype(np.int64), kind="stable")[:MOST_LOOKED_UP]
    looked_up = looked_up[target.lengths[looked_up] >= 16]
    wanted: dict[int, dict[bytes, int]] = {}
    for number in looked_up.tolist():
        tokens = _without_eod(target.get(number), eod_id)
        same = wanted.setdefault(len(tokens), {})
        same[tokens.tobytes()] = same.get(tokens.tobytes(), 0) + 1
    found = 0
    heads = {
        length: {np.frombuffer(key[:64], np.int64).tobytes() for key in same}
        for length, same in wanted.items()
    }
    some = np.flatnonzero(training.lengths > 0)
    some = some[:: max(len(some) // ENDS_READ, 1)]
    ends = [training.get(number, int(training.lengths[number]) - 1, 1) for number in some.tolist()]
    eod = int(any(end[0] == eod_id for end in ends))
    same_length = np.flatnonzero(np.isin(training.lengths, [length + eod for length in wanted]))
    if len(same_length) > most_compared:
        spread = np.linspace(0, len(same_length) - 1, most_compared).astype(np.int64)
        same_length = same_length[spread]
    for number in same_length.tolist():
        head = training.get(number, 0, 8).astype(np.int64).tobytes()
        if head in heads[int(training.lengths[number]) - eod]:
            tokens = _without_eod(training.get(number), eod_id)
            found += wanted.get(len(tokens), {}).pop(tokens.tobytes(), 0)
    return found, len(looked_up)


def _without_eod(tokens: NDArray[np.integer], eod_id: int) -> NDArray[np.int64]:
    """Return the tokens of a document, at least one, without an end-of-document token."""
    return tokens[: -1 if tokens[-1] == eod_id else None].astype(np.int64)
