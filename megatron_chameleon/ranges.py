"""Ranges of numeric options, declared in their types, and the base class that checks them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from megatron_chameleon.errors import UserError, format_names

LARGEST_INT32, LARGEST_INT64 = 2**31 - 1, 2**63 - 1
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


class Between(NamedTuple):
    """Smallest and largest value of an option; values in ``open_ends`` are excluded."""

    smallest: float
    largest: float
    open_ends: tuple[float, ...] = ()

    def holds(self, number: float) -> bool:
        """Whether the value is in the range; false for NaN."""
        return self.smallest <= number <= self.largest and number not in self.open_ends

    def __str__(self) -> str:
        low = "above" if self.smallest in self.open_ends else "at least"
        high = "below" if self.largest in self.open_ends else "at most"
        return f"{low} {self.smallest:.15g} and {high} {self.largest:.15g}"


Seed = Annotated[int, Between(0, 2**32 - 1)]
"""A random seed; the range is that of numpy's RandomState, with which Megatron shuffles samples."""
Count = Annotated[int, Between(1, LARGEST_INT32)]
LargeCount = Annotated[int, Between(1, LARGEST_INT64)]
"""A number of tokens or bytes."""
BatchSize = Annotated[int, Between(1, 2**24)]
"""A batch size. Gradients are summed in float32, where adding to a sum of 2^24 equal terms has no
effect."""
Repetitions = Annotated[int, Between(1, 10**7)]
"""A number of random draws or starts, whose results are all held in memory."""
Fits = Annotated[int, Between(1, 10**5)]
"""A number of trees or of fits, each of which takes a millisecond or more."""
SeveralRepetitions = Annotated[int, Between(2, 10**7)]
Minutes = Annotated[int, Between(1, 366 * 24 * 60)]
Processes = Annotated[int, Between(1, 2**16)]
Positive = Annotated[float, Between(0, LARGEST_FLOAT32, open_ends=(0,))]
NonNegative = Annotated[float, Between(0, LARGEST_FLOAT32)]
Share = Annotated[float, Between(0, 1)]
PositiveShare = Annotated[float, Between(0, 1, open_ends=(0,))]
BelowOne = Annotated[float, Between(0, 1, open_ends=(1,))]
InsideUnit = Annotated[float, Between(0, 1, open_ends=(0, 1))]

# Ranges of types that declare no range; these values are stored in arrays of int32 or float32.
_DEFAULTS = {
    int: Between(0, LARGEST_INT32),
    float: Between(-LARGEST_FLOAT32, LARGEST_FLOAT32),
}


def check_ranges(options: Any) -> None:
    """Check every number in the fields of an options dataclass; nested options check themselves.

    Raises:
        UserError: for the first number that is outside the range of its type, or not finite.
    """
    for flag, annotation, number in each_value(options, nested=False):
        if type(number) in _DEFAULTS:
            allowed = _range_of(annotation) or _DEFAULTS[type(number)]
            if not allowed.holds(number):
                raise UserError(f"{flag} {number}: must be {allowed}")


@dataclasses.dataclass(frozen=True)
class CheckedOptions:
    """Base class of options, which validate their fields when constructed.

    A subclass with constraints between fields extends ``__post_init__``.
    """

    def __post_init__(self) -> None:
        """Raise UserError for the first number out of range."""
        check_ranges(self)

    def reject_changed(self, fields: Iterable[str], reason: str) -> None:
        """Raise UserError for the first of ``fields`` that differs from its default.

        Args:
            fields: fields without effect in this combination of options; a group of options
                stands for all of its fields.
            reason: the reason, printed after the flag and its value.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in fields:
            value = getattr(self, name)
            if isinstance(value, CheckedOptions):
                value.reject_changed([field.name for field in dataclasses.fields(value)], reason)
            elif value != defaults[name]:
                plain = " ".join(map(str, value)) if isinstance(value, tuple) else value
                flag = f"{flag_of(name)} {plain}"
                if isinstance(value, bool):
                    flag = flag_of(name if value else f"no_{name}")
                raise UserError(f"{flag}: {reason}; leave it out")


def parse_named_numbers(
    flag: str, value: str, names: Collection[str] | None = None
) -> dict[str, float]:
    """Parse NAME=NUMBER pairs separated by commas.

    Args:
        flag: the option, for messages.
        value: value of the option.
        names: the names that may occur, which may contain an equals sign; any name if None.

    Raises:
        UserError: for an unknown or repeated name, or a number that is not from 0 to the largest
            float32.
    """
    found: dict[str, float] = {}
    for item in filter(None, map(str.strip, value.split(","))):
        name, equals, text = (part.strip() for part in item.rpartition("="))
        problem = None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (name and equals):
            problem = f"'{item}' is not NAME=NUMBER"
        elif names is not None and name not in names:
            problem = f"unknown name '{name}'"
        elif name in found:
            problem = f"'{name}' is named twice"
        elif not 0 <= number <= LARGEST_FLOAT32:
            problem = f"'{text}' of '{name}' must be a number from 0 to {LARGEST_FLOAT32:.2g}"
        if problem:
            among = f" with names of {format_names(list(names))}" if names is not None else ""
            raise UserError(f"{flag} {value}: {problem}; pass NAME=NUMBER,...{among}")
        found[name] = number
    if not found:
        raise UserError(f"{flag} {value}: names nothing; pass NAME=NUMBER,...")
    return found


def flag_of(field: str) -> str:
    """Flag of an options field: ``train_iters`` -> ``--train-iters``."""
    return f"--{field.replace('_', '-')}"


def each_value(options: Any, *, nested: bool = True) -> Iterator[tuple[str, Any, Any]]:
    """Yield flag, type and value of each field, and of each item of a tuple.

    With ``nested``, the fields of nested options are included.
    """
    types = _types_of(type(options))  # type: ignore[arg-type]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if not dataclasses.is_dataclass(value):
            for single in _singles(value):
                yield flag_of(field.name), types[field.name], single
        elif nested:
            yield from each_value(value)


@functools.cache
def _types_of(options_type: type) -> dict[str, Any]:
    return get_type_hints(options_type, include_extras=True)


def _singles(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _singles(item)
    else:
        yield value


def _range_of(annotation: Any) -> Between | None:
    """The range in the annotation of a type, or of a member of a union or tuple."""
    for part in get_args(annotation):
        found = part if isinstance(part, Between) else _range_of(part)
        if found:
            return found
    return None
