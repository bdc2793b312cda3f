"""Read known weights, and match their names with the domains of a corpus."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture import normalized
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.amounts import token_amounts
from megatron_chameleon.interchange.formats import read_mixture
from megatron_chameleon.interchange.published import published_column
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.training_free import AssignedWeights, run_training_free
from megatron_chameleon.ranges import parse_named_numbers


def compute_manual(options: ManualOptions) -> None:
    """Write known weights as a mixture."""

    def assign(corpus: Corpus, names: list[str]) -> AssignedWeights:
        notes, own_names, asked = [], {}, 0.0
        if options.published is not None:
            column = published_column(options.published)
            source, total = f"--published {options.published}", column.printed_sum
            # Published columns rarely sum to 1, so the sum is printed as a note, not a warning.
            known = {name: weight / total for name, weight in column.printed.items()}
            notes.append(f"the printed weights sum to {total:.4g}, and were divided by this sum")
            parameters: dict[str, Any] = {
                "published": options.published,
                "source": f"{column.source}, table '{column.table}'",
                "printed": dict(column.printed),
                "printed_sum": total,
            }
            fields: dict[str, Any] = {"paper_flops": column.flops}
            own_names = dict(column.own_names)
        elif options.tokens is not None or options.epochs is not None:
            sizes, where = corpus.train_tokens, str(corpus.root)
            source, amounts = token_amounts(options.tokens, options.epochs, sizes, where)
            asked = math.fsum(amounts.values())
            known = {name: tokens / asked for name, tokens in amounts.items()}
            parameters, fields = {"tokens": amounts}, {}
        else:
            assert options.weights is not None
            source, known, parameters, fields = read_weights(
                options.weights, options.output, corpus
            )
            if (budget := fields.pop("token_budget", None)) and options.token_budget is None:
                asked = budget
        domains = corpus.names, list(corpus.held_out)
        weights = match_domains(source, known, own_names, options.renames, *domains)
        kept = np.array([weights.get(name, 0.0) for name in names])
        total = math.fsum(kept)
        if total <= 0:
            raise UserError(f"{source}: it has no weight above 0 for any of {format_names(names)}")
        if total < 1.0 - 1e-9:
            notes.append(f"dropped {1.0 - total:.4f} of the total weight")
        if without := [name for name in names if name not in weights]:
            notes.append(f"weight 0 for {format_names(without)}, which {source} does not contain")
        parameters["rename"] = options.renames
        if asked:  # without the tokens of dropped names
            fields["token_budget"] = round(asked * total)
            notes.append(f"train on {fields['token_budget']:,} tokens, the sum of these amounts")
        heading = f"Weights from {source}"
        return AssignedWeights(kept / total, heading, parameters, closing=notes, **fields)

    run_training_free("manual", options, assign)


def read_weights(
    value: str, output: Path, corpus: Corpus
) -> tuple[str, dict[str, float], dict[str, Any], dict[str, Any]]:
    """Read ``--weights``: NAME=WEIGHT pairs, a .csv table, or a mixture.

    If the value is a mixture, the parameter ``made_from`` lists its path and the paths in its own
    ``made_from``. The report uses these paths to find the other costs.

    Args:
        value: value of ``--weights``.
        output: file of the mixture that will be written.
        corpus: the corpus, whose tokens a table of epochs refers to.

    Returns:
        A description of the source, for messages; the weights, not normalized; parameters of the
        new mixture; further fields of :class:`AssignedWeights`.

    Raises:
        UserError: if the weights cannot be read.
    """
    path, parameters, fields = Path(value), {}, {}
    if path.suffix == ".json":
        if path.resolve() == output.resolve():
            raise UserError(f"--weights and --output are both {path}: choose another --output")
        mixture = Mixture.load(path)
        old = mixture.parameters
        places = [path, *(path.parent / place for place in old.get("made_from", ()))]
        folder = output.parent.resolve()
        parameters = {
            "file": str(path),
            "file_method": mixture.method,
            "made_from": [os.path.relpath(place.resolve(), folder) for place in places],
        }
        if old.get("unknown_costs"):
            parameters["unknown_costs"] = old["unknown_costs"]
        recorded, cost = old.get("total_cost"), None
        # The cost of a Chameleon mixture excludes its proxy and its embedding store, which record
        # their own costs, so it is not the total cost.
        by_hash = mixture.provenance is not None and "checkpoint" in mixture.provenance.inputs
        if isinstance(recorded, dict):
            cost = Cost(float(recorded["flops"]), float(recorded["device_seconds"]))
        elif not (by_hash or old.get("made_from") or old.get("unknown_costs")):
            cost = mixture.cost
        fields = {
            "inputs": {"given mixture": mixture.hash},
            "paper_flops": old.get("paper_flops"),
            "inherited": cost,
        }
        return str(path), dict(mixture.weights), parameters, fields
    if path.suffix == ".csv":
        table = read_mixture(path, "csv", corpus=corpus)
        if table.stages:
            raise UserError(
                f"{path}: its weights change at step {table.stages[0].step}; select the weights of "
                "one step with convert_mixture --at-step"
            )
        fields = {
            "inputs": {"csv": sha256_of_files(path)},
            "token_budget": table.token_budget,
        }
        return str(path), table.weights, {"file": str(path)}, fields
    if "=" not in value:
        raise UserError(
            f"--weights {value}: pass NAME=WEIGHT,..., or a file that ends with .json or .csv"
        )
    return f"--weights {value}", parse_named_numbers("--weights", value), parameters, fields


def match_domains(
    source: str,
    known: Mapping[str, float],
    own_names: Mapping[str, str],
    renames: Sequence[str],
    corpus_names: Sequence[str],
    held_out: Sequence[str] = (),
) -> dict[str, float]:
    """Assign known weights to the domains of a corpus.

    If several names map to the same domain, their weights are added.

    Args:
        source: source of the weights, for messages.
        known: weights by the names of their source.
        own_names: name of a domain in its data set -> its name in ``known``.
        renames: values of ``--rename``.
        corpus_names: the domains of the corpus.
        held_out: the held-out domains of the corpus.

    Returns:
        Domain -> weight, without dropped names; the weights sum to 1 if none is dropped.

    Raises:
        UserError: for an unknown name, that of a held-out domain, or an invalid weight.
    """
    in_corpus = set(corpus_names)
    table = {name: name for name in known if name in in_corpus}
    for own_name, name in own_names.items():
        if own_name in in_corpus:
            table.setdefault(name, own_name)
    renamed = set()
    for rename in renames:
        old, equals, new = map(str.strip, rename.partition("="))
        problem = None
        if not equals or old not in known:
            problem = f"must be OLD=NEW, with OLD one of {format_names(list(known))}"
        elif old in renamed:
            problem = f"'{old}' is renamed twice; rename it once"
        elif new and new not in in_corpus:
            problem = (
                f"the corpus has no domain '{new}'; NEW must be one of "
                f"{format_names(corpus_names)}, or empty to drop '{old}'"
            )
        if problem:
            raise UserError(f"--rename {rename}: {problem}")
        renamed.add(old)
        table[old] = new
    if never := [name for name in known if name in held_out and name not in table]:
        raise UserError(
            f"{source}: '{never[0]}' is held out from training; add --rename {never[0]}= to drop it"
        )
    if unknown := [name for name in known if name not in table]:
        raise UserError(
            f"{source}: the corpus does not have {format_names([f'{n!r}' for n in unknown])}; its "
            f"domains are {format_names(corpus_names)}; add --rename {unknown[0]}=NAME with the "
            f"corpus's name, or --rename {unknown[0]}= to drop it"
        )
    weights: dict[str, float] = {}
    for name, weight in normalized(dict(known), source).items():
        if new := table[name]:
            weights[new] = weights.get(new, 0.0) + weight
    return weights
