"""Which flags a person has given, as far as their values tell it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def changed_flags(options: Any, default: Any) -> Iterator[tuple[str, object]]:
    """The flag and the value of each option that is not as in ``default``, in nested groups too.

    Args:
        options: a dataclass of options.
        default: another of the same type.
    """
    for field in dataclasses.fields(options):
        value, usual = getattr(options, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from changed_flags(value, usual)
        elif value != usual:
            yield f"--{field.name.replace('_', '-')}", value
