"""The interface of a mixing method, and the registry of all methods in this package."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pkgutil
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megatron_chameleon import methods
from megatron_chameleon.methods.options import OutputOptions

DEFAULT_METHOD = "chameleon"
# Modules with code that several methods share. Every other module must define METHOD.
SHARED_MODULES = {
    "limits",
    "method",
    "options",
    "output",
    "predicted_gain",
    "train_proxy",
    "training_free",
}


class Named(Protocol):
    """A declaration in the folder of a method."""

    @property
    def name(self) -> str:
        """The value of the option that selects the method."""


T = TypeVar("T", bound=Named)


@dataclasses.dataclass(frozen=True)
class Method:
    """An entry of ``--list-methods``: the ``METHOD`` of a module or folder of this package.

    Attributes:
        name: the value of ``--method``.
        options: the method's frozen dataclass; its flags are generated from it.
        compute: computes the mixture and writes it to ``options.output``. It is called on every
            rank with an instance of ``options``, returns the same exit status on all of them, and
            imports torch only when called. Any status except 0 and None means that no mixture was
            written; after a stop signal, the status is STOPPED_STATUS of errors.py.
        summary: short description of the weights.
        needs: inputs besides the corpus.
        cost: compute and memory.
        good_for: situations in which to choose the method.
        source: the paper that describes the method; empty if there is none.
    """

    name: str
    options: type[OutputOptions]
    compute: Callable[[Any], int | None]
    summary: str
    needs: str
    cost: str
    good_for: str
    source: str


@dataclasses.dataclass(frozen=True)
class DiscoveredMethods:
    """The methods of this package.

    Attributes:
        usable: name -> method: Chameleon first, the others sorted by name.
        unusable: an error message for each module without a usable method (file, problem, fix).
    """

    usable: Mapping[str, Method]
    unusable: Sequence[str]


def discover_methods() -> DiscoveredMethods:
    """Import every module and collect its ``METHOD``, or its tuple of ``METHODS``.

    A module that fails to import does not disable other modules. If two modules define the same
    name, neither is usable: choosing one would silently replace the other.
    """
    found: dict[str, list[tuple[str, Method]]] = collections.defaultdict(list)
    unusable = []
    for module in pkgutil.iter_modules(methods.__path__):
        if module.name in SHARED_MODULES:
            continue
        file_name = f"{module.name}/" if module.ispkg else f"{module.name}.py"
        try:
            imported = importlib.import_module(f"{methods.__name__}.{module.name}")
        except Exception as error:  # importing a user's module may raise any exception
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f.lineno for f in frames if f.filename.endswith(f"/{module.name}.py")]
            where = f" (line {lines[-1]})" if lines else ""
            message = " ".join(str(error).split())
            unusable.append(
                f"{file_name} cannot be imported: {type(error).__name__}: {message}{where}; fix it"
            )
            continue
        defines: Sequence[Any] = getattr(imported, "METHODS", None) or [
            getattr(imported, "METHOD", None)
        ]
        if all(isinstance(method, Method) for method in defines):
            for method in defines:
                found[method.name].append((file_name, method))
        elif not module.ispkg:  # a folder without METHOD may hold code that methods share
            unusable.append(f"{file_name} has no METHOD = Method(...): add it, or move the file")
    for name, defined in found.items():
        if len(defined) > 1:
            files = " and ".join(file_name for file_name, _ in defined)
            unusable.append(f"{files} both define method '{name}': rename one of them")
    usable = {name: defined[0][1] for name, defined in found.items() if len(defined) == 1}
    return DiscoveredMethods(dict(sorted(usable.items(), key=_chameleon_first)), unusable)


def find_declared(attribute: str, kind: type[T]) -> dict[str, T]:
    """Return name -> ``attribute`` of each folder: Chameleon first, the others sorted by name.

    A folder that fails to import is skipped; :func:`discover_methods` reports its error.
    """
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(methods.__path__):
        if module.ispkg:
            try:
                imported = importlib.import_module(f"{methods.__name__}.{module.name}")
            except Exception:  # importing a user's module may raise any exception
                continue
            declared = getattr(imported, attribute, None)
            if isinstance(declared, kind):
                assert declared.name not in found, (
                    f"two methods declare {attribute} {declared.name}"
                )
                found[declared.name] = declared
    return dict(sorted(found.items(), key=_chameleon_first))


def _chameleon_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != DEFAULT_METHOD, item[0]


def find_methods() -> Mapping[str, Method]:
    """Return name -> usable method: Chameleon first, the others sorted by name."""
    return discover_methods().usable


def format_method_list(width: int = 100) -> str:
    """Return the text of ``--list-methods``: requirements, cost and purpose of each method.

    Args:
        width: maximum line length in characters.
    """
    found, entries = discover_methods(), []
    for method in found.usable.values():
        lines = [f"{method.name}: {method.summary}"]
        for field in ("needs", "cost", "good_for", "source"):
            heading = f"  {field.replace('_', ' '):<10}"
            lines += textwrap.wrap(
                getattr(method, field), width, initial_indent=heading, subsequent_indent=" " * 12
            )
        entries.append("\n".join(lines))
    entries += [textwrap.fill(f"not usable: {line}", width) for line in found.unusable]
    return "\n\n".join([*entries, "Flags of one method: --method NAME --help"])
