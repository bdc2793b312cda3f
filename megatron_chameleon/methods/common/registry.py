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
    found: dict[str, Method] = {}
    for module in pkgutil.iter_modules(methods.__path__):
        if not module.ispkg:
            method: Method = importlib.import_module(f"{methods.__name__}.{module.name}").METHOD
            assert method.name not in found, f"{module.name}.py: '{method.name}' is there already"
            found[method.name] = method
    return dict(sorted(found.items(), key=lambda item: (item[0] != DEFAULT_METHOD, item[0])))


def methods_listed(width: int = 100) -> str:
    """What ``--list-methods`` prints: what each method needs, costs and is good for.

    Args:
        width: characters of a line, at most.
    """
    entries = [_entry(method, width) for method in find_methods().values()]
    return "\n\n".join([*entries, "--method NAME --help shows the flags of one of them."])


def _entry(method: Method, width: int) -> str:
    lines = [f"{method.name}: {method.summary}"]
    for field in ("needs", "cost", "good_for", "source"):
        lines += textwrap.wrap(
            getattr(method, field),
            width,
            initial_indent=f"  {field.replace('_', ' '):<10}",
            subsequent_indent=" " * 12,
        )
    return "\n".join(lines)
