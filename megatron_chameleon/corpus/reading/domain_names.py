"""How a source's own names become the names of domains."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.source import DomainOptions

# A longer domain name is most likely another field's text; as a file name it would not do.
MAX_DOMAIN_BYTES = 80
ALL_OTHERS = "*"
_NAMES_SHOWN = 10


class DomainNames:
    """The names that a source tells, renamed as asked.

    Attributes:
        key: of the domain's name in each record, None where it is not told there.
        from_config: whether the config of a data set is its domain.
        renamed: which OLD of ``--rename-domain OLD=NEW`` have occurred so far.

    Raises:
        UserError: for options that contradict each other or mean nothing.
    """

    def __init__(self, options: DomainOptions) -> None:
        self.key = options.domain_key
        self.from_config = options.domain_from_config
        self._pattern = _one_group(options.domain_from_path)
        self._renames = _rename_table(options.renames)
        self.renamed: set[str] = set()
        ways = self._ways()
        if len(ways) > 1:
            raise UserError(f"{' and '.join(ways)} both tell the domain; leave one of them out")
        if self._renames and not ways:
            raise UserError(
                f"--rename-domain {options.renames[0]} has no use where every --input names its "
                "domain; name it as you want it there"
            )

    @property
    def way(self) -> str | None:
        """The option by which sources tell their domains, None if there is none."""
        return next(iter(self._ways()), None)

    def final(self, name: str) -> str | None:
        """What the source's ``name`` is called, None if its text is left out."""
        if name in self._renames:
            self.renamed.add(name)
            return self._renames[name]
        return self._renames.get(ALL_OTHERS, name)

    def describe_unused(self, renamed: Collection[str]) -> str:
        """Which OLD there are besides ``renamed`` and '*', on one line; '' if there is none."""
        unused = [name for name in self._renames if name not in {*renamed, ALL_OTHERS}]
        return f"--rename-domain: no domain is called {_listed(unused)}" if unused else ""

    def in_path(self, path: str) -> str | None:
        """The source's name that ``path`` tells, None if paths tell none.

        Raises:
            UserError: if this one does not.
        """
        if self._pattern is None:
            return None
        found = self._pattern.search(path)
        if not found or not is_domain_name(found[1] or ""):
            raise UserError(
                f"{path}: --domain-from-path {self._pattern.pattern} finds no domain there; "
                "correct it, or give this input as NAME=PATH"
            )
        return found[1]

    def _ways(self) -> list[str]:
        ways = {
            "--domain-key": self.key is not None,
            "--domain-from-path": self._pattern is not None,
            "--domain-from-config": self.from_config,
        }
        return [flag for flag, used in ways.items() if used]


def describe_left_out(counts: Mapping[str, int], what: str) -> str:
    """How many (documents, files: ``what``) of which domains were left out, on one line."""
    return f"--rename-domain leaves out {sum(counts.values()):,} {what}, of {_listed(counts)}"


def _listed(names: Collection[str]) -> str:
    shown = [f"'{name}'" for name in list(names)[:_NAMES_SHOWN]]
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return ", ".join(shown + more)


def is_domain_name(name: str) -> bool:
    """Whether ``name`` would do as a domain's; bytes that are no UTF-8 would not."""
    try:
        return 0 < len(name.encode()) <= MAX_DOMAIN_BYTES
    except UnicodeEncodeError:
        return False


def _one_group(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"--domain-from-path {pattern} is no regular expression: {error}; correct it"
        ) from error
    if compiled.groups != 1:
        raise UserError(
            f"--domain-from-path {pattern} has {compiled.groups} groups; put the domain's name "
            "into the one pair of brackets, and write others as (?:...)"
        )
    return compiled


def _rename_table(renames: Sequence[str]) -> dict[str, str | None]:
    table: dict[str, str | None] = {}
    for given in renames:
        old, equals, new = given.rpartition("=")
        if not equals or not old or (new and not is_domain_name(new)):
            raise UserError(
                f"--rename-domain {given}: OLD=NEW is expected, NEW of at most {MAX_DOMAIN_BYTES} "
                "bytes, or OLD= to leave it out"
            )
        if table.get(old, new or None) != (new or None):
            raise UserError(
                f"--rename-domain {given}: '{old}' is also renamed to '{table[old] or ''}'; "
                "leave one of them out"
            )
        table[old] = new or None
    return table
