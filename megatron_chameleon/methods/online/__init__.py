"""Online methods: training hooks that change the mixture of a run, chosen by ``--online``.

A method declares itself by ``ONLINE`` in the ``__init__.py`` of its folder; options.py collects
these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import BelowOne, CheckedOptions, Count
from megatron_chameleon.training.options import OnlineOptions


@dataclasses.dataclass(frozen=True)
class Default:
    """The default of a flag for one method.

    Attributes:
        value: the value; None if the hook computes it.
        note: meaning of the flag or of its default, for ``--help``.
    """

    value: Any
    note: str = ""

    def __str__(self) -> str:
        shown = [] if self.value is None else [str(self.value)]
        return ", ".join([*shown, *([self.note] if self.note else [])])


@dataclasses.dataclass(frozen=True)
class OnlineMethod:
    """The ``ONLINE`` of a method's folder. It imports no torch.

    Attributes:
        name: the value of ``--online``.
        follows: what the mixture follows, for ``--help``.
        hook: module and class of the training hook, as MODULE:CLASS.
        defaults: field of each flag that the method reads -> its default.
        options: frozen dataclass of the flags that only this method has, all None or False by
            default.
        has_target: whether the mixture follows ``--target``; otherwise ``--target`` is an error.
    """

    name: str
    follows: str
    hook: str
    defaults: Mapping[str, Default]
    options: type[CheckedOptions] | None = None
    has_target: bool = False


SHARED_HELP = {
    "online_interval": "Steps between two updates of the mixture.",
    "online_smoothing": "Weight of the past in a moving average.",
    "online_warmup_iters": "Steps with the initial mixture.",
    "online_windows": "Maximum windows per domain.",
}
"""Help texts of the fields of OnlineFlags, to which options.py adds the methods' defaults."""


@dataclasses.dataclass(frozen=True)
class OnlineFlags(OnlineOptions):
    """Flags that several online methods read.

    Attributes:
        METHODS: name -> method.
    """

    METHODS: ClassVar[Mapping[str, OnlineMethod]] = {}

    online_interval: Count | None = None
    online_smoothing: BelowOne | None = None
    online_warmup_iters: int | None = None
    online_windows: Count | None = None

    def __post_init__(self) -> None:
        """Raise UserError for options that the method does not read."""
        super().__post_init__()
        if self.online and self.online not in self.METHODS:
            raise UserError(f"--online {self.online}: unknown; pass {', '.join(self.METHODS)}")
        reads = self.METHODS[self.online].defaults if self.online else {}
        names = [field.name for field in dataclasses.fields(self) if field.name != "online"]
        why = "has no effect without --online METHOD, such as --online chameleon"
        if self.online:
            why = f"does not apply to --online {self.online}"
        self.reject_changed([name for name in names if name not in reads], why)

    def setting(self, name: str) -> Any:
        """Value of the field ``name``, or the method's default if it is not set."""
        assert self.online is not None
        value = getattr(self, name)
        return self.METHODS[self.online].defaults[name].value if value is None else value

    def check_run(self, train_iters: int, target: str | None) -> None:
        """Raise UserError for a target that the method ignores, or an interval that is too long."""
        if not self.online:
            return
        method = self.METHODS[self.online]
        if target is not None and not method.has_target:
            raise UserError(
                f"--target {target}: --online {self.online} has no target, since it follows "
                f"{method.follows}; use --online aioli, the --mixture of compute_mixture --method "
                "mixmin --target, or evaluate perplexity --target later"
            )
        interval = self.setting("online_interval")
        if interval is not None and interval >= train_iters:
            raise UserError(
                f"--online-interval {interval}: must be < --train-iters {train_iters}; pass a "
                "smaller interval"
            )
