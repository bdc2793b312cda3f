"""The table of formats in which mixtures are read and written, and all formats but Megatron's."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    DomainSource,
    Mixture,
    MixtureStage,
    Split,
    implied_epochs,
)
from megatron_chameleon.artifacts.files import read_json, read_text
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.interchange import megatron
from megatron_chameleon.interchange.amounts import (
    check_total,
    mixture_of,
    sampled_tokens,
    tokens_of_epochs,
)
from megatron_chameleon.interchange.megatron import TOKENS_SUFFIX, sampled_from, split_option
from megatron_chameleon.interchange.options import FormatName
from megatron_chameleon.ranges import LARGEST_INT64
from megatron_chameleon.storage import is_remote

CSV_COLUMNS = (
    "domain",
    "weight",
    "tokens",
    "epochs",
    "step",
    "max_repetition",
    *(f"{split}_tokens" for split in SPLITS),
    *(f"{split}_prefix" for split in SPLITS),
    "split",
)
OLMO_CORE_KEYS = (
    "source_name",
    "target_ratio",
    "paths",
    "max_repetition_ratio",
    "max_source_fraction",
)
# Largest YAML file: weights of 32,767 domains that change 16 times take half of it.
MAX_YAML_BYTES = 1 << 25
# Values that the aliases of a YAML file may repeat.
MAX_ALIASED = 1_000_000


@dataclasses.dataclass(frozen=True)
class Format:
    """How mixtures are read and written in one format.

    Attributes:
        read: reads a file; the arguments are its path, the value of ``--split``, and the corpus
            that names the listed files.
        write: returns the text of a file that lists the files of one split. It leaves out domains
            with a weight of 0 if its reader rejects them.
        has_caps: whether the format can hold limits on repetition.
        has_stages: whether the format can hold weights that change.
        has_budget: whether the format can hold the number of tokens to sample.
    """

    read: Callable[[Path, Split | None, Corpus | None], Mixture]
    write: Callable[[Mixture, Split], str]
    has_caps: bool = False
    has_stages: bool = False
    has_budget: bool = False


def read_mixture(
    path: Path,
    name: FormatName = "json",
    *,
    split: Split | None = None,
    corpus: Corpus | None = None,
) -> Mixture:
    """Read a mixture. Weights are exact, but rescaled if their sum differs from 1 by over 1e-6.

    Args:
        path: the file.
        name: its format.
        split: for formats with weights of each split, the split whose weights are read; by default
            those of train, which the other splits must have, too.
        corpus: for Megatron's formats, the corpus that names the listed files.

    Raises:
        UserError: naming the file and the domain, if the file is not a mixture in this format.
    """
    return FORMATS[name].read(path, split, corpus).normalized(str(path))


def write_mixture(mixture: Mixture, name: FormatName, *, split: Split = "train") -> str:
    """Return the mixture in a format. Weights are exact, and files are absolute paths.

    Args:
        mixture: the mixture; formats that list files need its ``sources``.
        name: the format.
        split: for formats that list the files of one split, that split.

    Raises:
        UserError: naming the domains, if the format cannot hold a part of the mixture.
    """
    chosen = FORMATS[name]
    if mixture.stages and not chosen.has_stages:
        steps = ", ".join(str(stage.step) for stage in mixture.stages)
        raise UserError(
            f"{name} cannot hold weights that change (at step {steps}); pass --at-step STEP to "
            "convert the weights in force at one step"
        )
    if mixture.max_repetition and not chosen.has_caps:
        raise UserError(
            f"{name} cannot hold the limit on repetition of "
            f"{quoted(list(mixture.max_repetition))}; pass --drop-max-repetition to leave it out"
        )
    return chosen.write(mixture, split)


# Our own formats


def _read_json(path: Path, _split: Split | None, _corpus: Corpus | None) -> Mixture:
    return Mixture.load(path, may_change=True)


def _write_json(mixture: Mixture, _split: Split) -> str:
    """Format the file that :meth:`Mixture.save` writes."""
    kind = {"kind": Mixture.KIND, "format_version": Mixture.FORMAT_VERSION}
    return _json({**kind, **json_values(mixture)})


def _read_csv(path: Path, _split: Split | None, corpus: Corpus | None) -> Mixture:
    """Read a table with the columns domain and weight, and optionally the other ones.

    Instead of weights, the table may have amounts of text: tokens, or epochs of ``train_tokens`` or
    of the text in ``corpus``.
    """
    text = read_text(path, "pass a table with the columns domain and weight")
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        columns, rows = reader.fieldnames or [], list(reader)
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV table ({error})") from error
    for column in columns:
        if column not in CSV_COLUMNS or columns.count(column) > 1:
            problem = "repeated" if column in CSV_COLUMNS else "unknown"
            raise UserError(
                f"{path}: column '{column:.40}' is {problem}; the columns of a mixture are "
                f"{', '.join(CSV_COLUMNS)}, of which only domain, and weight, tokens or epochs are "
                "required"
            )
    amounts = [name for name in ("tokens", "epochs") if name in columns]
    if not {"domain", "weight"} <= {*columns, *(["weight"] if amounts else [])} or any(
        None in (*row, *row.values()) for row in rows
    ):
        raise UserError(
            f"{path}: must have the columns domain and weight, and in every row a value per column"
        )
    if len(amounts) > 1 or (amounts and "step" in columns):
        other = "epochs" if len(amounts) > 1 else "step"
        raise UserError(f"{path}: the columns {amounts[0]} and {other} exclude each other")
    by_step: dict[int, list[tuple[str, str]]] = {}
    caps: dict[str, float] = {}
    sources: dict[str, DomainSource] = {}
    for row in rows:
        name, step = row["domain"], row.get("step") or "0"
        at = _count(step, f"{path}: the step of '{name}'")
        by_step.setdefault(at, []).append((name, row.get("weight", "0")))
        if cap := row.get("max_repetition"):
            caps[name] = _number(cap, f"{path}: max_repetition of '{name}'")
        tokens: dict[Split, int] = {
            split: _count(row[column], f"{path}: {column} of '{name}'")
            for split in SPLITS
            if row.get(column := f"{split}_tokens")
        }
        files: dict[Split, list[str]] = {
            split: [f"{row[column]}{TOKENS_SUFFIX}"] if row[column] and tokens.get(split, 1) else []
            for split in SPLITS
            if (column := f"{split}_prefix") in row
        }
        if tokens or any(files.values()):
            sources[name] = DomainSource(files, tokens, row.get("split") or None)
    mixture = _staged(sorted(by_step.items()), path, caps, sources)
    if not amounts:
        return mixture
    (column,) = amounts
    texts = {row["domain"]: row[column] or "0" for row in rows}
    asked = {
        # Counts of tokens stay exact.
        name: int(text)
        if text.isdecimal() and len(text) <= 19
        else _number(text, f"{path}: {column} of '{name}'")
        for name, text in texts.items()
    }
    if not all(0 <= number < math.inf for number in asked.values()):
        raise UserError(f"{path}: {column} must be >= 0 and finite")
    if column == "epochs":
        sizes = {name: source.tokens.get("train", 0) for name, source in sources.items()}
        where = str(path if corpus is None else corpus.root)
        asked = tokens_of_epochs(asked, corpus.train_tokens if corpus else sizes, where)
    check_total(f"{path}: column {column}", asked)
    budget = mixture_of(asked)
    if "weight" not in columns:
        return dataclasses.replace(
            mixture, weights=budget.weights, token_budget=budget.token_budget
        )
    scale = math.fsum(asked.values()) / (math.fsum(mixture.weights.values()) or 1.0)
    tolerance = 1 + 1e-6 * max(asked.values())  # counts are whole tokens
    for name, weight in mixture.weights.items():
        if abs(weight * scale - asked[name]) > tolerance:
            raise UserError(
                f"{path}: the weight and the {column} of '{name}' contradict each other; leave out "
                "one of the columns"
            )
    return dataclasses.replace(mixture, token_budget=budget.token_budget)


def _write_csv(mixture: Mixture, _split: Split) -> str:
    """Format as CSV (RFC 4180) with a header; columns without any value are left out.

    Later stages have one row for each domain and step. The tokens of a domain are whole numbers,
    whose sum is the token budget; they are left out if weights change.
    """
    rows = []
    tokens: dict[str, int] = {}
    if mixture.token_budget and not mixture.stages:
        tokens = sampled_tokens(mixture.weights, mixture.token_budget)
    for stage in (MixtureStage(0, mixture.weights), *(mixture.stages or ())):
        for name, weight in stage.weights.items():
            row: dict[str, Any] = {"domain": name, "weight": repr(weight)}
            row["tokens"] = tokens.get(name, "")
            row["step"] = stage.step if mixture.stages else ""
            row["max_repetition"] = ""
            if stage.step == 0:
                row["max_repetition"] = (mixture.max_repetition or {}).get(name, "")
                source = (mixture.sources or {}).get(name, DomainSource())
                row |= {f"{split}_tokens": source.tokens.get(split, "") for split in SPLITS}
                row |= {f"{split}_prefix": _prefix(source, split, name) for split in SPLITS}
                row["split"] = source.split or ""
            rows.append(row)
    columns = [name for name in CSV_COLUMNS if any(str(row.get(name, "")) for row in rows)]
    text = io.StringIO(newline="")
    # The reader skips white space before an unquoted value, and ends a row at a carriage return.
    spaced = any(name != " ".join(name.split()) for name in mixture.weights)
    writer = csv.DictWriter(
        text,
        columns,
        extrasaction="ignore",
        lineterminator="\n",
        quoting=csv.QUOTE_ALL if spaced else csv.QUOTE_MINIMAL,
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _prefix(source: DomainSource, split: Split, name: str) -> str:
    files = source.files.get(split, [])
    if len(files) > 1 or not all(file.endswith(TOKENS_SUFFIX) for file in files):
        warnings.warn(f"csv has one .bin file per domain: left out those of '{name}'", stacklevel=4)
        return ""
    return files[0].removesuffix(TOKENS_SUFFIX) if files else ""


# Formats of other trainers


def _read_olmo_core(path: Path, split: Split | None, _corpus: Corpus | None) -> Mixture:
    """Read OLMo-core's ``SourceMixtureList``.

    A source without ``max_repetition_ratio`` has no limit here; OLMo-core does not repeat it.
    """
    listed = _list(_yaml_object(path), "sources", path)
    part: Split = split or "train"
    weights: list[tuple[str, Any]] = []
    caps: dict[str, float] = {}
    sources: dict[str, DomainSource] = {}
    for source in listed:
        name = _name(source.get("source_name"), f"{path}: source_name")
        # OLMo-core also writes private keys, such as _CLASS_.
        if unknown := [key for key in source if key not in OLMO_CORE_KEYS and f"{key}"[:1] != "_"]:
            raise UserError(
                f"{path}: '{name}' has the unknown key '{unknown[0]}'; the keys of a source are "
                f"{', '.join(OLMO_CORE_KEYS)}"
            )
        weights.append((name, source.get("target_ratio")))
        limits = [source.get(key) for key in ("max_repetition_ratio", "max_source_fraction")]
        if found := [limit for limit in limits if limit is not None]:
            caps[name] = math.prod(_number(limit, f"{path}: limit of '{name}'") for limit in found)
        sources[name] = DomainSource({part: _paths(source.get("paths"), path, name)})
    return _staged([(0, weights)], path, caps, sources)


def _write_olmo_core(mixture: Mixture, split: Split) -> str:
    """Format a ``SourceMixtureList`` as YAML, with token files.

    OLMo-core reads .bin files as they are: token ids without a header, each document ended by the
    end-of-document token. Its ``dtype`` is ``uint16`` or ``uint32``; int32 files are read as
    ``uint32``, since no id is negative. A limit of at least 1 is ``max_repetition_ratio``; a limit
    below 1 is ``max_source_fraction``. Without a limit no text is repeated.

    Raises:
        UserError: for a path that OLMo-core would read as a pattern, or a split without text.
    """
    sampled = _sampled_files(mixture, split)
    caps = _caps(mixture, split)
    sources = []
    for name, (weight, files) in sampled.items():
        source: dict[str, Any] = {"source_name": name, "target_ratio": weight, "paths": files}
        if (cap := caps.get(name)) is not None:
            source["max_repetition_ratio" if cap >= 1 else "max_source_fraction"] = cap
        sources.append(source)
    return _yaml({"sources": sources})


def _sampled_files(mixture: Mixture, split: Split) -> dict[str, tuple[float, list[str]]]:
    """Weight and files of the sampled domains, for readers of OLMo-core's files."""
    sampled = sampled_from(mixture, split)
    if not sampled:
        raise UserError(f"no domain with a weight above 0 has {split} tokens")
    divided = split_option(mixture) is not None
    for _, files in sampled.values():
        for file in files:
            if "*" in file and not is_remote(file) and Path(file).exists():
                raise UserError(f"{file}: OLMo-core reads '*' as a pattern; move the corpus")
            if divided:
                warnings.warn(
                    f"OLMo-core reads the whole {file}, including its valid and test text",
                    stacklevel=4,
                )
    return sampled


def _caps(mixture: Mixture, split: Split) -> dict[str, float]:
    """The limits on repetition, or else the epochs within the token budget, rounded up."""
    sources = mixture.sources or {}
    tokens = {name: source.tokens.get(split, 0) for name, source in sources.items()}
    if mixture.max_repetition is not None or mixture.token_budget is None:
        return mixture.max_repetition or {}
    known = {name: count for name, count in tokens.items() if count}
    epochs = implied_epochs(known, mixture.weights, mixture.token_budget)
    # Token budgets are rounded to whole tokens, so that three epochs may be slightly more.
    return {
        name: float(max(1, math.ceil(count - 0.5 / known[name]))) for name, count in epochs.items()
    }


def _read_levanter(path: Path, _split: Split | None, _corpus: Corpus | None) -> Mixture:
    """Read ``train_weights``, at the top or in ``data``: weights, or stages ``[step, weights]``."""
    body = _yaml_object(path)
    if "train_weights" not in body and isinstance(body.get("data"), dict):
        body = body["data"]
    stages = body.get("train_weights")
    if isinstance(stages, dict):
        stages = [[0, stages]]
    if not isinstance(stages, list) or not all(
        isinstance(stage, list) and len(stage) == 2 and isinstance(stage[1], dict)
        for stage in stages
    ):
        raise UserError(
            f"{path}: train_weights must be weights by name, or a list of [step, weights by name]"
        )
    return _staged([(stage[0], list(stage[1].items())) for stage in stages], path)


def _write_levanter(mixture: Mixture, _split: Split) -> str:
    """Format ``train_weights`` as YAML; every name must be one of levanter's ``components``.

    Levanter applies a stage from a step on, which must be a multiple of its ``mixture_block_size``
    divided by the batch size.
    """
    stages = [[stage.step, stage.weights] for stage in mixture.stages or ()]
    weights = mixture.weights
    return _yaml({"train_weights": [[0, weights], *stages] if stages else weights})


def _read_torchtitan(path: Path, _split: Split | None, _corpus: Corpus | None) -> Mixture:
    listed = _list(read_json(path, "pass a JSON object with sources"), "sources", path)
    return _staged([(0, [(each.get("dataset"), each.get("weight", 1.0)) for each in listed])], path)


def _write_torchtitan(mixture: Mixture, _split: Split) -> str:
    """Format JSON whose ``sources`` has the keyword arguments of one ``HFDataSource`` per domain.

    ``InterleavedHuggingFaceTextDataLoader`` samples packed sequences by these weights, so they are
    shares of the tokens. torchtitan reads text, not .bin files: each domain must be registered in
    its ``DATASETS``, which it looks up in lower case.

    Raises:
        UserError: for two domains whose names differ in case only.
    """
    names: dict[str, str] = {}
    for name in _sampled(mixture):
        if (other := names.setdefault(name.lower(), name)) != name:
            raise UserError(
                f"'{other}' and '{name}' are the same name for torchtitan, which ignores case; "
                f"pass --rename '{name}=OTHER'"
            )
    listed = [{"dataset": name, "weight": weight} for name, weight in _sampled(mixture).items()]
    return _json({"sources": listed})


def _read_litgpt(path: Path, _split: Split | None, _corpus: Corpus | None) -> Mixture:
    body = read_json(path, "pass a JSON object with datasets and weights")
    names, weights = body.get("datasets"), body.get("weights")
    if not isinstance(names, list) or not isinstance(weights, list) or len(names) != len(weights):
        raise UserError(f"{path}: datasets and weights must be lists of the same length")
    return _staged([(0, list(zip(names, weights, strict=True)))], path)


def _write_litgpt(mixture: Mixture, _split: Split) -> str:
    """Format arguments of litdata's ``CombinedStreamingDataset`` as JSON, with domain names.

    litdata reads its own chunks, not .bin files: replace each domain's name by a
    ``StreamingDataset``. ``iterate_over_all`` is false because litdata rejects weights otherwise.
    """
    sampled = _sampled(mixture)
    lists = {"datasets": list(sampled), "weights": list(sampled.values())}
    return _json({**lists, "iterate_over_all": False})


def _read_olmix(path: Path, split: Split | None, _corpus: Corpus | None) -> Mixture:
    """Read ``mix``, ``data`` and ``priors`` of an Olmix configuration.

    A nested mix is flattened as in Olmix: names are joined by colons, weights are multiplied, and
    ``repetition_factor`` is inherited.
    """
    body = _yaml_object(path)
    part: Split = split or "train"
    weights: list[tuple[str, float]] = []
    caps: dict[str, float] = {}

    def add(node: Mapping[str, Any], name: str, weight: float, cap: float | None) -> None:
        where = f"{path}: mix of '{name}'"
        if "weight" in node:
            # A leaf at the top keeps its exact weight.
            weight *= _number(node["weight"], where)
        if "repetition_factor" in node:
            cap = _number(node["repetition_factor"], where)
        children = {k: v for k, v in node.items() if k not in ("weight", "repetition_factor")}
        for child, value in children.items():
            if not isinstance(value, dict):
                raise UserError(f"{where}: '{child}' must have a weight")
            add(value, f"{name}:{_name(child, where)}", weight, cap)
        if not children:
            weights.append((name, weight))
            if cap is not None:
                caps[name] = cap

    mix = body.get("mix")
    if not isinstance(mix, dict) or not all(isinstance(node, dict) for node in mix.values()):
        raise UserError(f"{path}: mix must have an object with weight for each domain")
    for name, node in mix.items():
        add(node, _name(name, f"{path}: mix"), 1.0, None)
    files: dict[str, list[str]] = {}

    def add_files(listed: Any, parent: str) -> None:
        for source in listed if isinstance(listed, list) else [listed]:
            if not isinstance(source, dict):
                raise UserError(f"{path}: data.sources must be a list of objects with a name")
            name = parent + _name(source.get("name"), f"{path}: data.sources")
            if (paths := source.get("paths")) is not None:
                files[name] = _paths(paths, path, name)
            for key in ("topics", "quality"):
                add_files(source.get(key) or [], f"{name}:")

    def part_of(section: str, key: str) -> Any:
        content = body.get(section) or {}
        if not isinstance(content, dict):
            raise UserError(f"{path}: {section} must be an object, such as with {key}")
        return content.get(key)

    add_files(part_of("data", "sources") or [], "")
    tokens = part_of("priors", "token_counts") or {}
    if not isinstance(tokens, dict):
        raise UserError(f"{path}: priors.token_counts must have a number of tokens for each name")
    known = {name for name, _ in weights}
    if extra := [name for name in (*files, *tokens) if name not in known]:
        # Sources without weight are not sampled.
        weights += [(name, 0.0) for name in dict.fromkeys(extra)]
    sources = {
        name: DomainSource(
            {part: files[name]} if name in files else {},
            {part: _count(tokens[name], f"{path}: tokens of '{name}'")} if name in tokens else {},
        )
        for name in dict.fromkeys((*files, *tokens))
    }
    return _staged([(0, weights)], path, caps, sources)


def _write_olmix(mixture: Mixture, split: Split) -> str:
    """Format a flat ``mix`` as YAML, with ``data`` and ``priors`` if files and tokens are known.

    Raises:
        UserError: for a limit on repetition below 1, which Olmix passes to OLMo-core.
    """
    caps = _caps(mixture, split)
    if below := [name for name, cap in caps.items() if cap < 1]:
        raise UserError(
            f"olmix cannot hold the limit on repetition of {quoted(below)}, which is below 1; "
            "pass --drop-max-repetition to leave all limits out"
        )
    mix = {
        name: {"weight": weight} | ({"repetition_factor": caps[name]} if name in caps else {})
        for name, weight in mixture.weights.items()
    }
    body: dict[str, Any] = {"mix": mix}
    sources = (mixture.sources or {}).items()
    files = {name: source.files[split] for name, source in sources if source.files.get(split)}
    tokens = {name: source.tokens[split] for name, source in sources if split in source.tokens}
    if files:
        body["data"] = {"sources": [{"name": name, "paths": files[name]} for name in files]}
    if tokens:
        body["priors"] = {"token_counts": tokens}
    return _yaml(body)


def _read_regmix(path: Path, _split: Split | None, _corpus: Corpus | None) -> Mixture:
    train = _yaml_object(path).get("train")
    if not isinstance(train, dict):
        raise UserError(f"{path}: train must have a weight for each name")
    return _staged([(0, list(train.items()))], path)


def _write_regmix(mixture: Mixture, _split: Split) -> str:
    """Format RegMix's YAML: ``train`` has the weights, and ``valid`` the sampled domains.

    Raises:
        UserError: if a name begins with another name. RegMix reads every file whose name begins
            with the name of a domain, and would read the files of both.
    """
    names = sorted(mixture.weights)
    for name, following in itertools.pairwise(names):
        if following.startswith(name):
            raise UserError(
                f"RegMix would read the files of '{following}' as files of '{name}', too, with "
                "which the name begins; pass --rename to choose another name"
            )
    valid = dict.fromkeys(_sampled(mixture), 1.0)
    return _yaml({"train": mixture.weights, "valid": valid})


# Shared by several formats


def _sampled(mixture: Mixture) -> dict[str, float]:
    """The domains with a weight above 0; most readers reject a weight of 0."""
    return {name: weight for name, weight in mixture.weights.items() if weight > 0}


def _staged(
    stages: Sequence[tuple[Any, Sequence[tuple[Any, Any]]]],
    path: Path,
    caps: dict[str, float] | None = None,
    sources: dict[str, DomainSource] | None = None,
) -> Mixture:
    """Check names, weights and steps, and return the mixture; a missing weight is 0."""
    checked: list[tuple[int, dict[str, float]]] = []
    for stage, pairs in stages:
        step = _count(stage, f"{path}: the step")
        if step <= (checked[-1][0] if checked else -1):
            raise UserError(f"{path}: step {step}: the steps must be integers that increase from 0")
        weights: dict[str, float] = {}
        for key, value in pairs:
            name = _name(key, f"{path}: the weight {value}")
            if name in weights:
                raise UserError(f"{path}: duplicate domain '{name}'; name it once")
            weights[name] = _number(value, f"{path}: the weight of '{name}'")
        checked.append((step, weights))
    if not checked or not checked[0][1] or checked[0][0]:
        raise UserError(f"{path}: there are no weights for step 0")
    names = list(dict.fromkeys(name for _, weights in checked for name in weights))
    filled = [(step, {n: weights.get(n, 0.0) for n in names}) for step, weights in checked]
    for name, cap in (caps or {}).items():
        if not 0 < cap < math.inf:
            raise UserError(
                f"{path}: the limit on repetition of '{name}' is {cap}; must be above 0"
            )
    return Mixture(
        filled[0][1],
        stages=[MixtureStage(step, weights) for step, weights in filled[1:]] or None,
        max_repetition=caps or None,
        sources=sources or None,
    )


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: the name {value!r} must be text; put it in quotes")
    return value


def _number(value: object, where: str) -> float:
    """Convert a number, or a text such as 1e-05, which YAML does not read as a number."""
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{where} is {value!r:.40}; it must be a number")


def _count(value: object, where: str) -> int:
    """Convert an integer, or a text of one."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(LARGEST_INT64)):
        value = int(value)
    if type(value) is int and 0 <= value <= LARGEST_INT64:
        return value
    raise UserError(f"{where} is {value!r:.40}; it must be an integer from 0 to {LARGEST_INT64}")


def _paths(value: object, path: Path, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError(f"{path}: the paths of '{name}' must be a list of paths")
    return value


def _list(body: Mapping[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    listed = body.get(key)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UserError(f"{path}: {key} must be a list of objects")
    return listed


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that rejects a repeated key, of which PyYAML would use the last value.

    It also rejects aliases that contain themselves, and aliases that repeat more than
    ``MAX_ALIASED`` values, since a short file could stand for billions.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        known = dict[int, int]()
        if node is not None and _count_nodes(node, known) - len(known) > MAX_ALIASED:
            raise ValueError(f"its aliases repeat more than {MAX_ALIASED:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, count in keys.items() if count > 1 and key != "<<"]:
                raise yaml.constructor.ConstructorError(None, None, f"key '{twice[0]}' is repeated")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of nodes of ``node`` with its aliases written out.

    Args:
        node: a node of a graph.
        known: id of a node -> its number of nodes, or 0 during its count.

    Raises:
        ValueError: if a node contains itself.
    """
    if (count := known.get(id(node))) is not None:
        if count == 0:
            raise ValueError("an alias contains itself")
        return count
    known[id(node)], count = 0, 1
    if isinstance(node, yaml.SequenceNode | yaml.MappingNode):
        for each in node.value:
            for child in each if isinstance(each, tuple) else (each,):
                count += _count_nodes(child, known)
    known[id(node)] = count
    return count


def _yaml_object(path: Path) -> dict[Any, Any]:
    text = read_text(path, "pass a YAML file", MAX_YAML_BYTES)
    try:
        body = yaml.load(text, Loader=_UniqueKeys)
    except Exception as error:  # KeyError or AttributeError for a tag that does not fit its value
        problem = " ".join(str(error).split())
        raise UserError(f"{path}: not YAML ({problem}); repair it") from error
    if not isinstance(body, dict):
        raise UserError(f"{path}: expected a YAML mapping, not a {type(body).__name__}")
    return body


def _yaml(value: object) -> str:
    # Only ASCII: PyYAML does not read every other line break that it writes, such as U+0085.
    return yaml.safe_dump(value, sort_keys=False, width=math.inf)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[FormatName, Format] = {
    "json": Format(_read_json, _write_json, has_caps=True, has_stages=True, has_budget=True),
    "csv": Format(_read_csv, _write_csv, has_caps=True, has_stages=True, has_budget=True),
    "megatron-data-path": Format(megatron.read_data_path, megatron.write_data_path),
    "megatron-data-args": Format(megatron.read_data_path, megatron.write_data_args),
    "megatron-per-split": Format(megatron.read_per_split, megatron.write_per_split),
    "megatron-bridge": Format(megatron.read_bridge, megatron.write_bridge),
    "automodel": Format(megatron.read_automodel, megatron.write_automodel),
    "olmo-core": Format(_read_olmo_core, _write_olmo_core, has_caps=True),
    "levanter": Format(_read_levanter, _write_levanter, has_stages=True),
    "torchtitan": Format(_read_torchtitan, _write_torchtitan),
    "litgpt": Format(_read_litgpt, _write_litgpt),
    "olmix": Format(_read_olmix, _write_olmix, has_caps=True),
    "regmix": Format(_read_regmix, _write_regmix),
}
