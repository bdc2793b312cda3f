"""UserError, for errors that the user can fix, and messages of system errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator

MAX_NAMES = 10
"""Maximum number of names that a message lists."""
STOPPED_STATUS = 75
"""Exit status of a tool that was stopped before it wrote its output; the same command resumes. It
is EX_TEMPFAIL of sysexits.h."""


class UserError(ValueError):
    """An error in user input: a flag, a file, or a combination of them.

    The message is one line with the problem, its location and the fix. Tools print it without a
    traceback and exit with status 2; every other exception is a bug and keeps its traceback.
    """


# Errors caused by the machine, not by a bug.
_SYSTEM_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
# Errors from libraries in C++ and Rust have the text of a system error, but no errno. Python's
# tempfile raises FileNotFoundError if the disk is full.
_SYSTEM_ERROR_TEXT = re.compile(
    "|".join(map(re.escape, [*map(os.strerror, _SYSTEM_ERRNOS), "No usable temporary directory"]))
)


def system_error_message(error: BaseException) -> str | None:
    """One line on the system error that caused ``error``; None for a bug.

    Searches the chain of exceptions for the errno of an OSError, a MemoryError, or the text of a
    system error in another library's exception. A bug's exception that is raised while a system
    error is handled counts as a bug.
    """
    for cause in _chain(error):
        if isinstance(cause, MemoryError):
            return f"out of memory: {first_line(cause)}"
        if isinstance(cause, OSError) and cause.errno in _SYSTEM_ERRNOS:
            where = f" ({os.fsdecode(cause.filename)})" if cause.filename else ""
            return f"{cause.strerror}{where}"
        if isinstance(cause, Exception) and _SYSTEM_ERROR_TEXT.search(str(cause)):
            return first_line(cause)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        is_wrapper = not (following.__suppress_context__ or isinstance(following, _BUGS))
        following = following.__cause__ or (following.__context__ if is_wrapper else None)


def one_line(error: object) -> str:
    """The message of ``error`` without line breaks, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank; its type if there is none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def format_names(names: Collection[str]) -> str:
    """Join names by commas for a message: the first ten, and the number of the other names."""
    shown = ", ".join(list(names)[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else shown


def quoted(names: Collection[str]) -> str:
    """Join names as :func:`format_names` does, each in quotes."""
    return format_names([f"'{name}'" for name in names])
