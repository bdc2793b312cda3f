"""The methods there are: every file of ``megatron_chameleon/methods``."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap

from megatron_chameleon import methods
from megatron_chameleon.methods.common.method import Method

DEFAULT_METHOD = "chameleon"


def find_methods() -> dict[str, Method]:
    """Name -> method, Chameleon first, the others by name.

    A file is one by being there, so that a new method is listed nowhere else.
    """
    found = {}
    for module in pkgutil.iter_modules(methods.__path__):
        if not module.ispkg:
            method = importlib.import_module(f"{methods.__name__}.{module.name}").METHOD
            found[method.name] = method
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_METHOD, item[0])))


def methods_listed(width: int = 100) -> str:
    """What ``--list-methods`` prints: what each method needs, costs and is good for.

    Args:
        width: characters of a line, at most.
    """
    entries = []
    for method in find_methods().values():
        lines = [f"{method.name}: {method.summary}"]
        for heading in ("needs", "cost", "good_for", "source"):
            lines += textwrap.wrap(
                getattr(method, heading),
                width,
                initial_indent=f"  {heading.replace('_', ' '):<10}",
                subsequent_indent=" " * 12,
            )
        entries.append("\n".join(lines))
    return "\n\n".join(entries)
