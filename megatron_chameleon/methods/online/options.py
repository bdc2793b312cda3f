"""Options of pretrain_gpt, with the flags of all online methods."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro

from megatron_chameleon.methods.method import find_declared, find_methods
from megatron_chameleon.methods.online import SHARED_HELP, OnlineFlags, OnlineMethod
from megatron_chameleon.training import options as training_options

if TYPE_CHECKING:  # the hook imports torch
    from megatron_chameleon.training.hook import HookFactory


def find_online_methods() -> dict[str, OnlineMethod]:
    """Return name -> method: Chameleon first, the others sorted by name."""
    return find_declared("ONLINE", OnlineMethod)


@functools.cache
def online_columns() -> dict[str, str]:
    """Return the name of each online method's column in a comparison -> value of ``--online``.

    A method that also computes mixtures beforehand has the column NAME-online.
    """
    others = find_methods()
    return {f"{name}-online" if name in others else name: name for name in find_online_methods()}


def online_options(found: Mapping[str, OnlineMethod]) -> type[OnlineFlags]:
    """Return the options of ``--online``: the shared flags, and those of each method."""
    described = "; ".join(f"{name}: {method.follows}" for name, method in found.items())
    flags: dict[str, Any] = {
        "online": (
            Literal[tuple(found)] | None,
            "Method that changes the mixture, and what the mixture follows; by default, the "
            f"mixture is constant. Needs --permutation epoch or feistel. {described}.",
        )
    }
    types = get_type_hints(OnlineFlags, include_extras=True)
    for name, text in SHARED_HELP.items():
        defaults = [
            f"{method.name}: {method.defaults[name]}"
            for method in found.values()
            if name in method.defaults
        ]
        flags[name] = types[name], f"{text} Default: {'; '.join(defaults)}."
    own = [method.options for method in found.values() if method.options]
    return dataclasses.make_dataclass(
        "OnlineOptions",
        [
            (name, Annotated[kind, tyro.conf.arg(help=text)], None)
            for name, (kind, text) in flags.items()
        ],
        bases=(*reversed(own), OnlineFlags),  # fields are those of the last base first
        namespace={
            "METHODS": found,
            "__module__": __name__,
            "__doc__": "Online mixing: a method that changes the mixture during training.\n\n"
            "The defaults of these options depend on the method, and each method reads only some "
            "of them.",
        },
        frozen=True,
    )


OnlineOptions: Any = online_options(find_online_methods())
PretrainOptions: type[training_options.PretrainOptions] = dataclasses.make_dataclass(
    "PretrainOptions",
    [("online", OnlineOptions, dataclasses.field(default_factory=OnlineOptions))],
    bases=(training_options.PretrainOptions,),
    namespace={"__module__": __name__, "__doc__": training_options.PretrainOptions.__doc__},
    frozen=True,
    kw_only=True,
)


def hook_class(method: str | None) -> HookFactory | None:
    """Import the class of a method's hook; None without a method."""
    if method is None:
        return None
    module, _, name = OnlineOptions.METHODS[method].hook.partition(":")
    found: HookFactory = getattr(importlib.import_module(module), name)
    return found
