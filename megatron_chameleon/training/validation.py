"""Validation loss per domain during training, in the training layout."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence

import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.blend.data_path import DataPath, data_path_tokens
from megatron_chameleon.blend.sampler import Batch, read_ahead
from megatron_chameleon.blend.token_data import DomainData, corpus_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, choose_windows, reading_flops
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.metrics import mean_losses, sum_over_ranks
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import Passes, domain_sums


class Validation:
    """Loss on fixed windows of every domain's valid split.

    Windows ignore document boundaries and are scored as by tools/evaluate.py. Validation uses no
    random numbers and reads no training samples.

    Args:
        texts: windows of each domain; None for a domain without text.
        names: names of the domains.
        passes: passes of the trained model; validation batches have the shape of training batches.
        layout: layout of the ranks.
    """

    def __init__(
        self,
        texts: Sequence[HeldOutText | None],
        names: Sequence[str],
        passes: Passes,
        layout: Layout,
    ) -> None:
        self._texts, self._names, self._passes, self._layout = texts, names, passes, layout
        self._rows = [
            (domain, text, window)
            for domain, text in enumerate(texts)
            if text is not None
            for window in range(len(text.windows))
        ]

    @property
    def num_batches(self) -> int:
        """Number of global batches of one validation."""
        shape = self._passes.shape
        size = shape.num_microbatches * shape.micro_batch_size * self._layout.data_size
        return math.ceil(len(self._rows) / size)

    def flops(self, shape: ModelShape) -> float:
        """Forward FLOPs of one validation over all ranks, for a model of ``shape``."""
        return sum(reading_flops(shape, text) for text in self._texts if text is not None)

    def losses(self) -> dict[str, float]:
        """Domain -> mean negative log-likelihood of its tokens in nats. Collective.

        Losses are the same in every layout, up to rounding.
        """
        for chunk in self._passes.model:
            chunk.eval()
        sums = torch.zeros(len(self._names), 3, dtype=torch.float64, device=self._passes.device)
        micro_batches = (
            batch for number in range(self.num_batches) for batch in self.micro_batches(number)
        )
        with read_ahead(micro_batches, self._passes.device) as ahead:
            for _ in range(self.num_batches):
                batches = list(itertools.islice(ahead, self._passes.shape.num_microbatches))
                losses = self._passes.token_losses(batches)  # empty but on the last stage
                for batch, token_losses in zip(batches, losses, strict=bool(losses)):
                    masked = token_losses * batch["loss_mask"]
                    sums += domain_sums(batch, len(self._names), masked)
        for chunk in self._passes.model:
            chunk.train()
        total, tokens, _ = sum_over_ranks(sums, self._layout).cpu().T.tolist()
        return mean_losses(self._names, total, tokens)

    def micro_batches(self, number: int) -> Iterator[Batch]:
        """This rank's micro-batches of global batch ``number``, as in training.

        Micro-batches are assigned to data-parallel ranks round-robin; padding rows have no loss.
        """
        shape, layout = self._passes.shape, self._layout
        size, length = shape.micro_batch_size, shape.seq_length
        for turn in range(number * shape.num_microbatches, (number + 1) * shape.num_microbatches):
            first = (turn * layout.data_size + layout.data_rank) * size
            batch = {
                "tokens": torch.zeros(size, length, dtype=torch.int64),
                "labels": torch.zeros(size, length, dtype=torch.int64),
                "loss_mask": torch.zeros(size, length),
                "position_ids": torch.arange(length).repeat(size, 1),
                "domain": torch.zeros(size, dtype=torch.int64),
            }
            for place, (domain, text, window) in enumerate(self._rows[first : first + size]):
                *parts, _ = text.arrays(window, window + 1)
                for name, part in zip(("tokens", "labels", "loss_mask"), parts, strict=True):
                    batch[name][place] = torch.from_numpy(part[0])
                batch["domain"][place] = domain
            yield batch


def build_validation(plan: TrainingPlan, passes: Passes, layout: Layout) -> Validation | None:
    """Build the run's validation; None if there is none before its last step.

    A domain without text in its valid split is skipped with a warning.

    Raises:
        UserError: if files are damaged, or no domain has a valid split.
    """
    options = plan.options
    interval = options.validation.eval_interval
    if not 0 < interval <= options.train_iters:
        return None
    if options.corpus is not None:
        data = corpus_tokens(Corpus.load(options.corpus), "valid")
    else:
        assert options.data.data_path is not None
        path = DataPath.parse(options.data.data_path)
        try:
            data = data_path_tokens(path, options.data.split, plan.data.tokenizer, "valid")
        except UserError as error:
            raise UserError(f"{error}; or pass --eval-interval 0") from error
    windows = options.validation.eval_iters * options.global_batch_size // len(data.domains)
    if options.validation.eval_tokens is not None:
        windows = options.validation.eval_tokens // options.seq_length
    texts = [held_out_text(d, options.seq_length, max(windows, 1)) for d in data.domains]
    empty = [name for name, text in zip(data.names, texts, strict=True) if text is None]
    if len(empty) == len(texts):
        raise UserError(
            f"--eval-interval {interval}: the valid split of {data.where} is empty; change "
            "--split, or pass --eval-interval 0"
        )
    if empty:
        warnings.warn(f"no validation of {', '.join(empty)}: no valid split", stacklevel=2)
    return Validation(texts, data.names, passes, layout)


def held_out_text(domain: DomainData, window_length: int, max_windows: int) -> HeldOutText | None:
    """Windows spread evenly over the text of ``domain``; None if there is no token to predict."""
    if domain.tokens < 2:
        return None
    file = domain.open()
    start = int(file.pointers[domain.first]) // file.dtype.itemsize
    tokens = range(start, start + domain.tokens)
    return choose_windows(file.tokens, window_length, max_windows * window_length, tokens=tokens)
