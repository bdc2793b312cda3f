"""Ranges of numeric options, declared in their types and checked in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from megatron_chameleon.errors import UserError

LARGEST_INT32, LARGEST_INT64 = 2**31 - 1, 2**63 - 1
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


class Between(NamedTuple):
    """Smallest and largest value of an option; ``open_ends`` excludes them, or one of them."""

    smallest: float
    largest: float
    open_ends: tuple[float, ...] = ()

    def holds(self, number: float) -> bool:
        """Whether an option may have this value; NaN never."""
        return self.smallest <= number <= self.largest and number not in self.open_ends

    def __str__(self) -> str:
        low = "above" if self.smallest in self.open_ends else "at least"
        high = "below" if self.largest in self.open_ends else "at most"
        return f"{low} {self.smallest:.15g} and {high} {self.largest:.15g}"


Seed = Annotated[int, Between(0, 2**32 - 1)]
"""numpy's RandomState, by which Megatron orders samples, takes no more."""
Count = Annotated[int, Between(1, LARGEST_INT32)]
LargeCount = Annotated[int, Between(1, LARGEST_INT64)]
"""Of tokens or bytes."""
BatchSize = Annotated[int, Between(1, 2**24)]
"""Gradients are summed in float32: beyond 2^24 equal terms, a further one adds nothing."""
Repetitions = Annotated[int, Between(1, 10**7)]
"""Random draws or starts, whose results are all held in memory."""
SeveralRepetitions = Annotated[int, Between(2, 10**7)]
Minutes = Annotated[int, Between(1, 366 * 24 * 60)]
Processes = Annotated[int, Between(1, 2**16)]
Positive = Annotated[float, Between(0, LARGEST_FLOAT32, open_ends=(0,))]
NonNegative = Annotated[float, Between(0, LARGEST_FLOAT32)]
Share = Annotated[float, Between(0, 1)]
PositiveShare = Annotated[float, Between(0, 1, open_ends=(0,))]
BelowOne = Annotated[float, Between(0, 1, open_ends=(1,))]
InsideUnit = Annotated[float, Between(0, 1, open_ends=(0, 1))]

# Where a type names no range: what the arrays and tensors that it ends in can hold.
_DEFAULTS = {
    int: Between(0, LARGEST_INT32),
    float: Between(-LARGEST_FLOAT32, LARGEST_FLOAT32),
}


def check_ranges(options: Any) -> None:
    """Check every number of an options dataclass, those of nested ones included.

    Raises:
        UserError: for the first that is outside the range of its type, or not finite.
    """
    for flag, annotation, number in each_value(options):
        if type(number) in _DEFAULTS:
            allowed = _range_of(annotation) or _DEFAULTS[type(number)]
            if not allowed.holds(number):
                raise UserError(f"{flag} {number}: must be {allowed}")


def each_value(options: Any) -> Iterator[tuple[str, Any, Any]]:
    """Flag, type and each single value of all fields, those of nested dataclasses included."""
    types = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from each_value(value)
        else:
            for single in _singles(value):
                yield f"--{field.name.replace('_', '-')}", types[field.name], single


def _singles(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _singles(item)
    else:
        yield value


def _range_of(annotation: Any) -> Between | None:
    """The range that a type names, in a union or a tuple too."""
    for part in get_args(annotation):
        found = part if isinstance(part, Between) else _range_of(part)
        if found:
            return found
    return None
