"""The methods there are: every file of ``megatron_chameleon/methods``."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pkgutil
import textwrap
import traceback
from collections.abc import Mapping, Sequence

from megatron_chameleon import methods
from megatron_chameleon.methods.common.method import Method

DEFAULT_METHOD = "chameleon"


@dataclasses.dataclass(frozen=True)
class FoundMethods:
    """What the files of the folder give.

    Attributes:
        usable: name -> method, Chameleon first, the others by name.
        unusable: a line for each file that gives none: which, why, and what to do.
    """

    usable: Mapping[str, Method]
    unusable: Sequence[str]


def look_for_methods() -> FoundMethods:
    """Import every file. One that cannot be used takes none of the others with it.

    A file is a method by being there, so that a new one is listed nowhere else. Of two files with
    one name neither is usable: whichever was taken would silently stand for the other.
    """
    found: dict[str, list[tuple[str, Method]]] = collections.defaultdict(list)
    unusable = []
    for module in pkgutil.iter_modules(methods.__path__):
        if module.ispkg:
            continue
        method = _method_of(module.name)
        if isinstance(method, Method):
            found[method.name].append((f"{module.name}.py", method))
        else:
            unusable.append(method)
    unusable += [_told_twice(name, files) for name, files in found.items() if len(files) > 1]
    usable = {name: files[0][1] for name, files in found.items() if len(files) == 1}
    ranked = sorted(usable.items(), key=lambda item: (item[0] != DEFAULT_METHOD, item[0]))
    return FoundMethods(dict(ranked), unusable)


def find_methods() -> Mapping[str, Method]:
    """Name -> method of the files that can be used, Chameleon first, the others by name."""
    return look_for_methods().usable


def _method_of(module: str) -> Method | str:
    """The method of a file of the folder, or the line that says why it has none."""
    try:
        method = getattr(importlib.import_module(f"{methods.__name__}.{module}"), "METHOD", None)
    except Exception as error:  # whatever a person's file does must not disable the others
        return f"{module}.py cannot be imported: {_one_line(error, f'{module}.py')}; mend it"
    if not isinstance(method, Method):
        return f"{module}.py is no method: it has no METHOD = Method(...); add it, or move the file"
    return method


def _one_line(error: Exception, file_name: str) -> str:
    """The error, with the line of the file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.endswith(f"/{file_name}")]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _told_twice(name: str, files: Sequence[tuple[str, Method]]) -> str:
    both = " and ".join(file_name for file_name, _ in files)
    return f"{both} are both called '{name}': give each a name of its own"


def methods_listed(width: int = 100) -> str:
    """What ``--list-methods`` prints: what each method needs, costs and is good for.

    Args:
        width: characters of a line, at most.
    """
    found = look_for_methods()
    entries = [_entry(method, width) for method in found.usable.values()]
    entries += [textwrap.fill(f"not usable: {line}", width) for line in found.unusable]
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
