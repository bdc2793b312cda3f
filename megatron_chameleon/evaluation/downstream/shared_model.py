"""One model that all ranks have parts of, asked by the first of them.

lm-eval runs on rank 0: it loads the tasks and draws the shots there alone, so that ranks cannot
differ in what they ask. The others serve: they wait for work, and do it together with rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_chameleon.evaluation.downstream.generation import Generated, Generator, Prompt
from megatron_chameleon.evaluation.downstream.scoring import Answers, Question, Scorer
from megatron_chameleon.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class _Score:
    questions: Sequence[Question]
    description: str


@dataclasses.dataclass(frozen=True)
class _Generate:
    prompts: Sequence[Prompt]


@dataclasses.dataclass(frozen=True)
class _Stop:
    """There is no more work."""


class SharedModel:
    """What answers lm-eval's requests.

    Every call is one of all ranks. What rank 0 gives is done; what others give does not matter, so
    they may as well :meth:`serve`.
    """

    def __init__(self, scorer: Scorer, generator: Generator) -> None:
        self.scorer = scorer
        self.generator = generator

    @property
    def layout(self) -> Layout:
        """How the model is spread over ranks."""
        return self.scorer.reader.layout

    def score(self, questions: Sequence[Question], description: str = "") -> Answers:
        """See :meth:`Scorer.score`."""
        answers: Answers = self._do(self._told(_Score(questions, description)))
        return answers

    def generate(self, prompts: Sequence[Prompt]) -> Generated:
        """See :meth:`Generator.generate`."""
        generated: Generated = self._do(self._told(_Generate(prompts)))
        return generated

    def serve(self) -> None:
        """Work with rank 0 until it stops; called by the others."""
        assert not self.layout.is_main
        while not isinstance(work := self._told(None), _Stop):
            self._do(work)

    def stop(self) -> None:
        """Let the others go; called by rank 0."""
        assert self.layout.is_main
        self._told(_Stop())

    def _told(self, work: object) -> object:
        """What rank 0 gives, on every rank."""
        if self.layout.world_size == 1:
            return work
        box: list[Any] = [work if self.layout.is_main else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _do(self, work: object) -> Any:
        if isinstance(work, _Score):
            return self.scorer.score(work.questions, work.description)
        assert isinstance(work, _Generate), work
        return self.generator.generate(work.prompts)
