"""The one exception that means: the person at the keyboard can put this right."""

from __future__ import annotations

STOPPED_STATUS = 75
"""Exit status of a tool that was asked to stop before it made what others read; the same command
goes on. It is EX_TEMPFAIL of sysexits.h."""


class UserError(ValueError):
    """A mistake in what the user gave: a flag, a file, a combination of the two.

    The message is one line that says what is wrong, where, and what to do. Tools print it without
    a traceback and leave with exit status 2; everything else is a defect and keeps its traceback.
    """
