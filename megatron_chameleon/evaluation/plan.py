"""What an evaluation was asked for, with the artifacts it names, all checked."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus, EvaluationResult, Protocol, Provenance, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.evaluation_result import KIND, FirstToken
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.evaluation import HeldOutOptions, PerplexityOptions
from megatron_chameleon.options.ranges import check_ranges


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The options with the artifacts they name, all checked."""

    options: PerplexityOptions
    corpus: Corpus
    checkpoint: CheckpointRecord
    shape: ModelShape
    protocol: Protocol
    provenance: Provenance


def plan_evaluation(options: PerplexityOptions) -> EvaluationPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    check_ranges(options)
    corpus = Corpus.load(options.corpus)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(record, corpus)
    shape = shape_of(record)
    protocol = protocol_of(options, check_window(shape, options.window_length))
    check_model_layout(shape.size, options.parallel, protocol.window_length)
    check_output(options.output, KIND)
    return EvaluationPlan(
        options=options,
        corpus=corpus,
        checkpoint=record,
        shape=shape,
        protocol=protocol,
        provenance=provenance(options, {"corpus": corpus.hash, "checkpoint": record.hash}),
    )


def kept_result(plan: EvaluationPlan) -> EvaluationResult | None:
    """What an earlier command has written to ``--output``, if it is what this one would write."""
    output = plan.options.output
    if plan.options.overwrite or not output.is_file():
        return None
    try:
        found = EvaluationResult.load(output)
    except UserError:
        return None  # of another format, or no result: the new one takes its place
    asked = (plan.checkpoint.hash, plan.corpus.hash, plan.protocol)
    return found if asked == (found.checkpoint_hash, found.corpus_hash, found.protocol) else None


def protocol_of(options: HeldOutOptions, window_length: int) -> Protocol:
    """The protocol that ``options`` ask for.

    Raises:
        UserError: if they contradict each other.
    """
    if not 0 <= options.overlap < window_length:
        raise UserError(
            f"--overlap {options.overlap}: a window of {window_length} tokens can take over from 0 "
            f"to {window_length - 1} of them from the one before"
        )
    if options.max_tokens is not None and options.max_tokens < window_length:
        raise UserError(
            f"--max-tokens {options.max_tokens} is less than one window of {window_length} tokens; "
            "give more, or a shorter --window-length"
        )
    by_document = options.packing == "documents"
    if options.first_token is not None and not by_document:
        raise UserError(
            f"--first-token {options.first_token} is for --packing documents; packed, all "
            "documents but the first follow another one's end: leave it out"
        )
    default: FirstToken = "after-eod" if by_document else "not-scored"
    return Protocol(
        split=options.split,
        window_length=window_length,
        packing=options.packing,
        end_of_document=options.score_end_of_document,
        max_tokens=options.max_tokens,
        overlap=options.overlap,
        first_token=options.first_token or default,
    )
