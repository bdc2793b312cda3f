"""The one exception that means: the person at the keyboard can put this right."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

STOPPED_STATUS = 75
"""Exit status of a tool that was asked to stop before it made what others read; the same command
goes on. It is EX_TEMPFAIL of sysexits.h."""


class UserError(ValueError):
    """A mistake in what the user gave: a flag, a file, a combination of the two.

    The message is one line that says what is wrong, where, and what to do. Tools print it without
    a traceback and leave with exit status 2; everything else is a defect and keeps its traceback.
    """


# What the system says for reasons that lie in the machine, and not in the program.
_REFUSALS = (
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
_DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
# Libraries in C++ and Rust pass on the words alone.
_REFUSAL_TEXT = re.compile("|".join(re.escape(os.strerror(number)) for number in _REFUSALS))


def refusal_of_system(error: BaseException) -> str | None:
    """One line on what the system refused, where that is behind ``error``; None for a defect.

    It is looked for in the chain of exceptions, by the number of an OSError, by the type of a
    MemoryError, and in the text of other libraries' errors. A defect that comes up while a refusal
    is handled is a defect.
    """
    for cause in _chain(error):
        if isinstance(cause, MemoryError):
            return f"out of memory: {_first_line(cause)}"
        if isinstance(cause, OSError) and cause.errno in _REFUSALS:
            where = f" ({os.fsdecode(cause.filename)})" if cause.filename else ""
            return f"{cause.strerror}{where}"
        if isinstance(cause, Exception) and _REFUSAL_TEXT.search(str(cause)):
            return _first_line(cause)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        is_wrapper = not (following.__suppress_context__ or isinstance(following, _DEFECTS))
        following = following.__cause__ or (following.__context__ if is_wrapper else None)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
