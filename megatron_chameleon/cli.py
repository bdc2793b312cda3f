"""Run a tool: parse flags into options, call one function, report user errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from megatron_chameleon.console import (
    escape_everything_printed,
    lost_output,
    message_line,
    open_output,
)
from megatron_chameleon.errors import STOPPED_STATUS, UserError, system_error_message
from megatron_chameleon.parallel.releases import import_problem
from megatron_chameleon.ranges import each_value

Options = TypeVar("Options")

USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130
# If all ranks raise the same error, rank 0 reports it, and torchrun then terminates the others. A
# rank that is still alive after this many seconds has raised another error, and reports it.
OTHER_RANKS_DELAY_SECONDS = 8.0
# gloo raises one of these errors on a rank whose peer has exited.
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe")
OPTION_TYPES = ConstructorRegistry()


def run_tool(
    function: Callable[[Options], int | None],
    options_type: type[Options],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    *,
    prints_log: bool = False,
) -> NoReturn:
    """Parse ``argv`` into ``options_type``, call ``function`` with it and exit the process.

    Exit status: the return value of ``function`` (None is 0), 130 if interrupted, and 2 for a user
    error or a system error (disk full, file unreadable, too many open files, out of memory).
    STOPPED_STATUS becomes 0 under torchrun, which treats every other status as a failure. SIGTERM,
    which schedulers and torchrun send, acts as Ctrl-C.

    A failing standard output does not stop the tool: output that cannot be printed is dropped, and
    all files are written. If output was dropped, the status is 2 instead of 0, unless the reader
    closed the pipe, as in ``tool | head``, or the output only repeats what is written to disk.

    Args:
        function: the tool's work.
        options_type: a dataclass of its options.
        argv: arguments; default: those of this process.
        prog: name of the tool in --help.
        prints_log: whether the output only repeats what is written to disk.
    """
    rank = start()
    options = parse_options(options_type, sys.argv[1:] if argv is None else argv, rank, prog)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.excepthook = _thread_ended
    # All ranks raise the same warnings; only rank 0 prints them.
    warnings.showwarning = OneLineWarnings() if rank == 0 else lambda *_, **__: None
    # These warnings of libraries are meant for developers, not for users.
    for noise in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", noise)
    escape_everything_printed()
    try:
        check_text_and_paths(options)
        status = function(options) or 0
    except UserError as error:
        exit_with_error(str(error), rank)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    except ImportError as error:
        problem = import_problem(error)
        if problem is None:
            raise
        exit_with_error(problem, rank)
    except Exception as error:
        if LOST_PEER.search(str(error)):
            # Give torchrun time to end this process: the rank that exited has reported the cause.
            _wait_for_other_ranks(2 if rank == 0 else 1)
        problem = system_error_message(error)
        if problem is None:
            raise
        exit_with_error(f"{problem}; fix it and run the same command again", rank)
    # torchrun would turn STOPPED_STATUS into a failure with a traceback and status 1, and
    # schedulers do not requeue failed jobs.
    keeps_status = status != STOPPED_STATUS or "TORCHELASTIC_RUN_ID" not in os.environ
    leave(status if keeps_status else 0, prints_log=prints_log)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A command with one set of options: ``function`` and its options dataclass; see run_tool."""

    function: Callable[[Any], int | None]
    options: type[Any]
    prints_log: bool = False

    def run(self, argv: Sequence[str] | None = None, prog: str | None = None) -> NoReturn:
        """Parse the options, call the function and exit the process."""
        run_tool(self.function, self.options, argv, prog, prints_log=self.prints_log)


@dataclasses.dataclass(frozen=True)
class Subcommands:
    """A command whose first argument names one of ``tools``."""

    tools: Mapping[str, Tool]

    def run(self) -> NoReturn:
        """Run the named tool with the other arguments, and exit the process."""
        rank = start()
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        prog = os.path.basename(sys.argv[0])
        if name in ("-h", "--help"):
            names = ",".join(self.tools)
            if rank == 0:
                print(f"usage: {prog} {{{names}}} [options]; {prog} COMMAND --help shows them")
            leave(0)
        if name not in self.tools:
            problem = f"unknown command '{name}'" if name else "no command"
            known = " or ".join(f"'{tool}'" for tool in self.tools)
            exit_with_error(f"{prog}: {problem}; the first argument is {known}", rank)
        self.tools[name].run(sys.argv[2:], prog=f"{prog} {name}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A command with a flag that selects its function and its other flags.

    Attributes:
        flag: the flag, such as ``--method``.
        default: default value of the flag.
        find: returns the tool of each value, and a line for each value that is defined but not
            usable, which the error for an unknown value contains.
        listing_flag: the flag that lists the values.
        listing: returns the text that ``listing_flag`` prints.
        others: flag -> the tool that runs instead if the flag is passed.
    """

    flag: str
    default: str
    find: Callable[[], tuple[Mapping[str, Tool], Sequence[str]]]
    listing_flag: str
    listing: Callable[[], str]
    others: Mapping[str, Tool] = dataclasses.field(default_factory=dict)

    def run(self) -> NoReturn:
        """Run the selected tool with the other arguments, and exit the process."""
        rank = start()
        values, argv = take_values(self.flag, sys.argv[1:])
        if self.listing_flag in argv:
            if rank == 0:
                print(self.listing())
            leave(0)
        for flag in filter(argv.__contains__, self.others):
            if values:
                exit_with_error(f"{flag} takes no {self.flag}; leave {self.flag} out", rank)
            rest = [argument for argument in argv if argument != flag]
            self.others[flag].run(rest, prog=f"{os.path.basename(sys.argv[0])} {flag}")
        if len(values) > 1:
            exit_with_error(
                f"{self.flag} appears {len(values)} times ({', '.join(values)}): each value has "
                "its own flags; pass one, and run the tool once per value",
                rank,
            )
        tools, unusable = self.find()
        name = values[0] if values else self.default
        names = ", ".join(tools)
        if name not in tools:
            problem = f"{self.flag} {name}: unknown value; {self.listing_flag} describes {names}"
            exit_with_error("; ".join([problem, *unusable]), rank)
        if not values and rank == 0 and {"-h", "--help"} & set(argv):
            print(
                f"{self.flag} {{{names.replace(', ', ',')}}} (default: {self.default}): each value "
                f"has its own flags, see {self.flag} NAME --help; {self.listing_flag} describes "
                "the values"
            )
            for flag, tool in self.others.items():
                purpose = (tool.options.__doc__ or "").partition("\n")[0]
                print(f"{flag}, instead of {self.flag}: {purpose} See {flag} --help.")
            print()
        tools[name].run(argv, prog=f"{os.path.basename(sys.argv[0])} {self.flag} {name}")


Command = Tool | Subcommands | Choice


def take_values(flag: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of ``flag`` in ``argv``, and the other arguments."""
    values: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == flag:
            values.append(next(arguments, ""))
        elif argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        else:
            rest.append(argument)
    return values, rest


def parse_options(
    options_type: type[Options], argv: Sequence[str], rank: int = 0, prog: str | None = None
) -> Options:
    """Parse the options in ``argv``. An unknown flag or a value of the wrong type exits with 2.

    The last occurrence of a repeated flag wins, also for lists of values. Launchers thus override
    values for a dry run, and users override the launchers' values. Fields with ``UseAppendAction``
    accumulate.
    """
    printed = io.StringIO()
    help_text = sys.stdout if rank == 0 else io.StringIO()
    try:
        with contextlib.redirect_stdout(help_text), contextlib.redirect_stderr(printed):
            return tyro.cli(
                options_type,
                prog=prog,
                args=list(argv),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
                registry=OPTION_TYPES,
            )
    except SystemExit as left:
        if left.code in (0, None):
            leave(0)
        exit_with_error(_flatten(printed.getvalue()), rank)
    except RejectedOptionsError as error:
        exit_with_error(str(error), rank)


class RejectedOptionsError(Exception):
    """Wraps a UserError raised by options, since tyro would reword a ValueError."""


@OPTION_TYPES.struct_rule
def _fields_of_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Build options from flags; the help of a flag is its field's docstring without line breaks.

    tyro's own rule keeps the line breaks of the source, which then break lines of the help.
    """
    if not dataclasses.is_dataclass(info.type):
        return None
    types = get_type_hints(info.type, include_extras=True)
    helps = field_helps(info.type)

    @functools.wraps(info.type, updated=())  # --help prints the docstring
    def instantiate(**values: Any) -> Any:
        try:
            return info.type(**values)
        except UserError as error:
            raise RejectedOptionsError(str(error)) from error

    return StructConstructorSpec(
        instantiate=instantiate,
        fields=tuple(
            StructFieldSpec(
                name=field.name,
                type=types[field.name],
                default=default_of(field, info.default),
                helptext=helps.get(field.name),
            )
            for field in dataclasses.fields(info.type)
        ),
    )


def check_text_and_paths(options: Any) -> None:
    """Check that text is valid UTF-8, and that paths are regular files or folders.

    Reading a pipe or a device may never end, and writing a result would replace it.

    Raises:
        UserError: for the first value that is not UTF-8, or the first path that is a pipe, a
            socket or a device.
    """
    try:
        working = os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working folder: {error.strerror}; change to another folder"
        ) from error
    for flag, _, value in (("the working folder", None, working), *each_value(options)):
        if not isinstance(value, str | Path):
            continue
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UserError(f"{flag} {value}: not UTF-8; choose another name") from None
        if isinstance(value, Path) and value.exists() and not (value.is_file() or value.is_dir()):
            raise UserError(f"{flag} {value}: neither a regular file nor a folder")


def field_helps(options_type: type) -> dict[str, str]:
    """Field -> help of its flag, for the fields of an options dataclass with a docstring."""
    return {
        doc.arg_name: "\n\n".join(" ".join(text.split()) for text in doc.description.split("\n\n"))
        for base in reversed(options_type.__mro__)
        if dataclasses.is_dataclass(base)
        for doc in _parse_docstrings(base).params
        if doc.description
    }


# field_helps is called several times for a class, and parsing the source of its module is slow.
_parse_docstrings = functools.cache(docstring_parser.parse_from_object)


def default_of(field: dataclasses.Field[Any], options: Any) -> Any:
    """Value of ``field`` in ``options`` if this is an instance; otherwise the default of the field.

    MISSING_NONPROP if the field has no default.
    """
    if dataclasses.is_dataclass(options):
        return getattr(options, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING_NONPROP if field.default is dataclasses.MISSING else field.default


def leave(status: int, *, prints_log: bool = False) -> NoReturn:
    """Exit with ``status``; lost output is reported and can change the status (see run_tool)."""
    lost = lost_output()
    if lost is not None and (prints_log or lost.errno != errno.EPIPE):  # EPIPE: tool | head
        kind = "warning" if prints_log else "error"
        problem = f"standard output could not be written: {lost.strerror}"
        print(f"{kind}: {problem}; all files are written", file=sys.stderr)
        status = status if prints_log else status or USER_ERROR_STATUS
    sys.exit(status)


def exit_with_error(message: str, rank: int) -> NoReturn:
    """Print ``message`` once for the whole job, and exit with the status of a user error."""
    if rank != 0:
        _wait_for_other_ranks()
    where = "" if rank == 0 else f"rank {rank}: "
    print(f"error: {where}{message_line(message)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        os._exit(USER_ERROR_STATUS)  # undestroyed process groups could hang or abort the exit
    sys.exit(USER_ERROR_STATUS)


def _wait_for_other_ranks(turns: int = 1) -> None:
    """Sleep long enough for torchrun to end this process, if another rank has exited."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(turns * OTHER_RANKS_DELAY_SECONDS)


def _flatten(box: str) -> str:
    """The text of the box that tyro prints, on one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" │╰╯─|") for line in text.splitlines() if not line.startswith("╭")]
    flat = "; ".join(line for line in lines if line.strip("-"))
    return re.sub(r"([:,;]);", r"\1", flat)


def start() -> int:
    """Open the standard streams, after a restart in UTF-8 mode if necessary; return the rank.

    If RANK is set by something other than torchrun, such as a pod, a rank other than 0 prints that
    it prints nothing else. RANK without WORLD_SIZE is removed, with a warning.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    open_output()
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        del os.environ["RANK"]
        print(
            "warning: RANK is set, but not WORLD_SIZE: running as a single process; launch several "
            "ranks with torchrun",
            file=sys.stderr,
            flush=True,
        )
    try:
        rank, world_size = launched_rank(os.environ)
    except UserError as error:
        exit_with_error(str(error), 0)
    if rank > 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
        print(f"rank {rank} of {world_size} (from RANK and WORLD_SIZE): rank 0 prints and writes")
    return rank


def launched_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of ranks that a launcher set; (0, 1) without RANK.

    Raises:
        UserError: if MASTER_ADDR or MASTER_PORT is missing, or a variable is invalid.
    """
    if "RANK" not in environment:
        return 0, 1
    fix = "unset RANK to run a single process, or launch with torchrun"
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        raise UserError(f"RANK and WORLD_SIZE must be integers; {fix}") from None
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}; {fix}")
    needed = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if world_size > 1 and needed:
        raise UserError(f"WORLD_SIZE is {world_size}, but {needed[0]} is not set; {fix}")
    return rank, world_size


def _thread_ended(failed: threading.ExceptHookArgs) -> None:
    """Print why a library's thread failed; the main thread will fail with its own error."""
    problem = failed.exc_value and system_error_message(failed.exc_value)
    if problem:
        warnings.warn(problem, stacklevel=2)
    else:
        threading.__excepthook__(failed)


class OneLineWarnings:
    """Prints each warning once per process.

    Python's own registry is reset whenever a library changes the warning filters, and some inputs
    are read twice.
    """

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(
        self, message: Warning | str, category: type[Warning], *_where: object, **_more: object
    ) -> None:
        """Print ``message``, unless it was printed before."""
        text = " ".join(str(message).split())
        if text not in self._shown:
            self._shown.add(text)
            print(f"warning: {message_line(text)}", file=sys.stderr, flush=True)
