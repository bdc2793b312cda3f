"""Which of the paper's settings a run folder is in: by its domains, its model and its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.downstream_result import DownstreamProtocol
from megatron_chameleon.report.comparison import Comparison
from megatron_chameleon.report.downstream_comparison import base_run_of
from megatron_chameleon.report.paper.results import DataSet, Setting, paper_settings
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import Cell, Row

# The paper does not print the tokens of its base models. These are what examples/hyperparameters.sh
# assumes; steps of 10,000 are the paper's in fine-tuning.
ASSUMED_STEPS = 10_000
ASSUMED_SEQ_LENGTH = 1024
# A run of half to twice as many tokens is taken to be in the setting.
TOKEN_FACTOR = 2.0
SHOTS = [0, 1, 2, 3, 4, 5]
PREFIXES = ("redpajama", "slimpajama", "thepile", "pile", "wiki40b", "thestack", "stack")


@dataclasses.dataclass(frozen=True)
class PaperMatch:
    """The setting whose domains are those of a run folder.

    Attributes:
        setting: the first on these domains that has the runs' model, or else the first.
        names: domain of the corpus -> what the paper's columns call it.
        differences: what is not as in the setting: aspect, in these runs, in the paper.
    """

    setting: Setting
    names: Mapping[str, str]
    differences: tuple[Row, ...]


def match_setting(folder: RunFolder, comparison: Comparison | None) -> PaperMatch | None:
    """The setting of the paper that fits the evaluated runs best; None on other domains.

    Where no perplexity was evaluated, it is that of the base runs; without any, the first.
    """
    domains = _domains(folder, comparison)
    candidates = [
        (setting, names)
        for setting in paper_settings().values()
        if (names := paper_names(setting.data_set, domains)) is not None
    ]
    if not candidates:
        return None
    runs = _runs(folder, comparison)
    fitting = [pair for pair in candidates if all(_has_model(run, pair[0]) for run in runs)]
    setting, names = (fitting or candidates)[0]
    rows = (_model_row(runs, setting), _tokens_row(runs, setting), _start_row(runs, setting))
    return PaperMatch(setting, names, tuple(row for row in rows if row is not None))


def paper_names(data_set: DataSet, domains: Iterable[str]) -> dict[str, str] | None:
    """Domain -> the paper's name of it; None unless they are all of its domains, each once."""
    column = next(iter(data_set.weight_columns().values()))
    known = {_plain(name): name for name in column.printed}
    known |= {_plain(own): name for own, name in column.own_names.items()}
    known |= data_set.spellings
    found = {domain: known.get(_plain(domain)) or known.get(_bare(domain)) for domain in domains}
    names = {domain: name for domain, name in found.items() if name is not None}
    is_one_to_one = len(set(names.values())) == len(names) == len(found)
    return names if is_one_to_one and set(names.values()) == set(column.printed) else None


def describe_tokens(setting: Setting) -> str:
    """How many tokens the setting is taken to have."""
    return (
        f"not printed; taken as {ASSUMED_STEPS:,} steps of {setting.batch_size} x "
        f"{ASSUMED_SEQ_LENGTH:,} = {_tokens(setting):,}"
    )


def downstream_differences(protocol: DownstreamProtocol) -> tuple[Row, ...]:
    """In what tasks were asked otherwise than in the paper."""
    rows = []
    if sorted(protocol.shots) != SHOTS:
        shots = ", ".join(map(str, protocol.shots))
        rows.append(_row("shots of downstream tasks", shots, ", ".join(map(str, SHOTS))))
    if protocol.limit is not None:
        rows.append(_row("questions of each task", f"the first {protocol.limit:,}", "all"))
    return tuple(rows)


def _domains(folder: RunFolder, comparison: Comparison | None) -> list[str]:
    """Of the corpus; without one, those of the evaluations."""
    if folder.corpus is not None:
        return folder.corpus.names
    return [] if comparison is None else [*comparison.domains, *comparison.left_out]


def _runs(folder: RunFolder, comparison: Comparison | None) -> list[TrainingRun | None]:
    """The runs that have figures; None for each whose record is not in 5-base."""
    if comparison is not None:
        return [run.run for run in comparison.runs]
    asked = [folder.base_runs.get(base_run_of(folder, name)) for name in folder.downstream]
    return asked or list(folder.base_runs.values())


def _plain(name: str) -> str:
    """``name`` in lower case, with letters, digits and '+' alone."""
    return "".join(sign for sign in name.casefold() if sign.isalnum() or sign == "+")


def _bare(name: str) -> str:
    """As above, without the name of the data set before it."""
    plain = _plain(name)
    for prefix in PREFIXES:
        if plain.startswith(prefix):
            return plain.removeprefix(prefix)
    return plain


def _has_model(run: TrainingRun | None, setting: Setting) -> bool:
    return run is not None and _size_of(run) == dict(setting.model)


def _size_of(run: TrainingRun) -> object:
    """The dimensions in a run's record."""
    return run.model.get("size")


def _tokens(setting: Setting) -> int:
    return ASSUMED_STEPS * setting.batch_size * ASSUMED_SEQ_LENGTH


def _model_row(runs: Sequence[TrainingRun | None], setting: Setting) -> Row | None:
    if all(_has_model(run, setting) for run in runs):
        return None
    ours = ", ".join(dict.fromkeys(_model_told(run) for run in runs))
    layers, width = setting.model["num_layers"], setting.model["hidden_size"]
    return _row("model", ours, f"{setting.size}: {layers} layers of width {width:,}")


def _model_told(run: TrainingRun | None) -> str:
    if run is None:
        return "unknown (its run is not in 5-base)"
    size = _size_of(run)
    parameters = f"{run.parameters:,} parameters"
    if not isinstance(size, dict) or not {"num_layers", "hidden_size"} <= set(size):
        return parameters
    return f"{size['num_layers']} layers of width {size['hidden_size']:,} ({parameters})"


def _tokens_row(runs: Sequence[TrainingRun | None], setting: Setting) -> Row | None:
    tokens = [run.tokens for run in runs if run is not None]
    expected = _tokens(setting)
    if all(expected / TOKEN_FACTOR <= count <= expected * TOKEN_FACTOR for count in tokens):
        return None
    low, high = f"{min(tokens):,}", f"{max(tokens):,}"
    ours = low if low == high else f"{low} to {high}"
    return _row("training tokens", ours, f"{_tokens(setting):,} (assumed)")


def _start_row(runs: Sequence[TrainingRun | None], setting: Setting) -> Row | None:
    """Whether the models started from weights that were there."""
    started = {"pretrained checkpoint" in r.provenance.inputs for r in runs if r is not None}
    if started <= {setting.fine_tuned}:
        return None
    told = {True: "trained weights", False: "random weights"}
    paper = "weights trained on the Pile" if setting.fine_tuned else told[False]
    return _row("start", " and ".join(told[each] for each in sorted(started)), paper)


def _row(aspect: str, ours: str, paper: str) -> Row:
    return Cell(aspect), Cell(ours), Cell(paper)
