"""From the command line to one function call; a person's mistakes are reported in one line."""

from __future__ import annotations

import contextlib
import dataclasses
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
    escaped,
    lost_output,
    open_output,
    reader_has_left,
)
from megatron_chameleon.errors import STOPPED_STATUS, UserError, refusal_of_system
from megatron_chameleon.options.ranges import check_ranges, each_value

Options = TypeVar("Options")

USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130
# A mistake that every rank sees is told by rank 0 alone; torchrun then ends the others. A rank that
# is still alive after this long found something that rank 0 did not, so it speaks for itself.
SECONDS_BEFORE_OTHER_RANKS_SPEAK = 8.0
# What gloo says on a rank that was talking to one that has left.
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
    """Parse ``argv`` into ``options_type``, call ``function`` with it and leave the process.

    Exit status: what ``function`` returns (None is 0), 130 if interrupted, and 2 for a user's
    mistake, or where the system refuses (disk full, file unreadable, too many open files, out of
    memory). STOPPED_STATUS is 0 under torchrun, which knows failures alone. SIGTERM, by which
    schedulers and torchrun end a process, acts as Ctrl-C.

    The work never depends on standard output: what cannot be printed is dropped, and all files are
    written. Where something was dropped, the status is 2 in place of 0, except if the reader left,
    as in ``tool | head``, or if the tool prints the log of what it writes to disk.

    Args:
        function: the tool's work.
        options_type: a dataclass of its options.
        argv: of this process unless given.
        prog: what --help calls the tool.
        prints_log: whether all that it prints is such a log.
    """
    _start()
    rank = int(os.environ.get("RANK", "0"))
    options = parse_options(options_type, sys.argv[1:] if argv is None else argv, rank, prog)
    signal.signal(signal.SIGTERM, _interrupt)
    threading.excepthook = _thread_ended
    warnings.showwarning = OneLineWarnings() if rank == 0 else _no_warning
    for noise in (FutureWarning, DeprecationWarning):  # of libraries, for their programmers
        warnings.simplefilter("ignore", noise)
    escape_everything_printed()
    try:
        check_ranges(options)
        check_text_and_paths(options)
        status = function(options) or 0
    except UserError as error:
        _refuse(str(error), rank)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    except Exception as error:
        if LOST_PEER.search(str(error)):
            _let_others_speak(2 if rank == 0 else 1)  # the one that left says why
        refusal = refusal_of_system(error)
        if refusal is None:
            raise
        _refuse(f"{refusal}; put that right and run the same command again", rank)
    # torchrun would make a traceback and status 1 of it, as of a failure, and a scheduler does not
    # queue again what has failed.
    is_told = status != STOPPED_STATUS or "TORCHELASTIC_RUN_ID" not in os.environ
    _leave(status if is_told else 0, prints_log=prints_log)


def run_subcommand(
    commands: Mapping[str, tuple[Callable[[Any], int | None], type[Any]]],
) -> NoReturn:
    """Like :func:`run_tool` for a tool whose first argument names one of ``commands``."""
    _start()
    rank = int(os.environ.get("RANK", "0"))
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    tool = os.path.basename(sys.argv[0])
    if name in ("-h", "--help"):
        print(f"usage: {tool} {{{','.join(commands)}}} [options]; {tool} COMMAND --help shows them")
        _leave(0)
    if name not in commands:
        problem = f"no such command '{name}'" if name else "no command given"
        _refuse(f"{tool}: {problem}; the first argument is {_one_of(commands)}", rank)
    function, options_type = commands[name]
    run_tool(function, options_type, sys.argv[2:], prog=f"{tool} {name}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A flag whose value chooses what a tool does, and with it all its other flags.

    Attributes:
        flag: such as ``--method``.
        default: its value where it is not given.
        commands: value -> what is called, with options of which type.
        listing_flag: prints what the values mean.
        listing: what it prints.
        unusable: a line for each value that should be there and cannot be used; told where a value
            is unknown, which may be one of them.
    """

    flag: str
    default: str
    commands: Mapping[str, tuple[Callable[[Any], int | None], type[Any]]]
    listing_flag: str
    listing: Callable[[], str]
    unusable: Sequence[str] = ()


def run_choice(choice: Choice) -> NoReturn:
    """Like :func:`run_tool` for a tool with a flag that chooses its command."""
    _start()
    rank = int(os.environ.get("RANK", "0"))
    names, argv = take_values(choice.flag, sys.argv[1:])
    tool = os.path.basename(sys.argv[0])
    if choice.listing_flag in argv:
        if rank == 0:
            print(choice.listing())
        _leave(0)
    name = names[0] if names else choice.default
    problem = _problem_of(choice, names, name)
    if problem:
        _refuse(problem, rank)
    if not names and rank == 0 and {"-h", "--help"} & set(argv):
        print(
            f"{choice.flag} {{{','.join(choice.commands)}}} chooses ({choice.default} unless given)"
            f": each has flags of its own, which --help shows beside it; {choice.listing_flag} "
            "tells of them\n"
        )
    function, options_type = choice.commands[name]
    run_tool(function, options_type, argv, prog=f"{tool} {choice.flag} {name}")


def _problem_of(choice: Choice, given: Sequence[str], name: str) -> str:
    """What is wrong with the values given to the flag, of which there may be one; or nothing."""
    if any(not value or value.startswith("-") for value in given):
        return f"{choice.flag} has no value: give it one of {', '.join(choice.commands)}"
    if len(given) > 1:
        return (
            f"{choice.flag} is given {len(given)} times ({', '.join(given)}): each of them has "
            "flags of its own; give one, and start the tool again for another"
        )
    if name not in choice.commands:
        unusable = "".join(f"; {line}" for line in choice.unusable)
        return (
            f"{choice.flag} {name}: there is none of that name; {choice.listing_flag} tells of "
            f"{', '.join(choice.commands)}{unusable}"
        )
    return ""


def take_values(flag: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values that ``argv`` gives ``flag``, and what is left of it."""
    values: list[str] = []
    rest: list[str] = []
    given = iter(argv)
    for argument in given:
        if argument == flag:
            values.append(next(given, ""))
        elif argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        else:
            rest.append(argument)
    return values, rest


def parse_options(
    options_type: type[Options], argv: Sequence[str], rank: int = 0, prog: str | None = None
) -> Options:
    """The options in ``argv``. A misspelt flag or a value of the wrong type ends with status 2.

    Of a flag that is given twice the last one counts, lists of values included: so the launchers
    replace a value for a small try, and a person any of theirs. Fields with ``UseAppendAction``
    gather instead.
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
            _leave(0)
        _refuse(_flatten(printed.getvalue()), rank)
    except UserError as error:  # of an options class that validates itself
        _refuse(str(error), rank)


@OPTION_TYPES.struct_rule
def _fields_of_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """How options are made of flags, each field's docstring as one flowing text.

    tyro's own rule keeps the line breaks of the source, which then fall anywhere in the help.
    """
    if not dataclasses.is_dataclass(info.type):
        return None
    types = get_type_hints(info.type, include_extras=True)
    helps = field_helps(info.type)
    return StructConstructorSpec(
        instantiate=info.type,
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
    """Check that text can be recorded, and that paths are of files and folders.

    To read a pipe or a device may never end, and a result would be renamed over it.

    Raises:
        UserError: for the first value that holds bytes which are not UTF-8, or the first path that
            is a pipe, a socket or a device.
    """
    try:
        working = os.getcwd()
    except OSError as error:
        raise UserError(f"the working folder: {error.strerror}; change to another one") from error
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
    """Field -> the help of its flag, for the fields of an options dataclass that have one."""
    documented = {
        doc.arg_name: _flowing(doc)
        for base in reversed(options_type.__mro__)
        if dataclasses.is_dataclass(base)
        for doc in docstring_parser.parse_from_object(base).params
    }
    return {name: text for name, text in documented.items() if text is not None}


def default_of(field: dataclasses.Field[Any], options: Any) -> Any:
    """A field's default: as in ``options``, if there are default ones, or its own.

    MISSING_NONPROP where there is none.
    """
    if dataclasses.is_dataclass(options):
        return getattr(options, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING_NONPROP if field.default is dataclasses.MISSING else field.default


def _flowing(documented: docstring_parser.DocstringParam) -> str | None:
    """A field's docstring without line breaks, but for those between paragraphs."""
    if documented.description is None:
        return None
    paragraphs = re.split(r"\n\s*\n", documented.description)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _leave(status: int, *, prints_log: bool = False) -> NoReturn:
    """Exit with ``status``; see :func:`run_tool` for what becomes of it if output was lost."""
    lost = lost_output()
    if lost is not None and (prints_log or not reader_has_left(lost)):
        what = f"standard output could not be written: {lost.strerror}"
        if prints_log:
            print(f"warning: {what}; the run's folder has all figures", file=sys.stderr)
        else:
            print(f"error: {what}; what was printed is lost, files are written", file=sys.stderr)
            status = status or USER_ERROR_STATUS
    sys.exit(status)


def _refuse(message: str, rank: int) -> NoReturn:
    """Say ``message`` once for the whole job, and leave with the status of a user's mistake."""
    if rank != 0:
        _let_others_speak()
    where = "" if rank == 0 else f"rank {rank}: "
    print(f"error: {where}{escaped(message)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        os._exit(USER_ERROR_STATUS)  # groups that were not left could hang or abort the exit
    sys.exit(USER_ERROR_STATUS)


def _let_others_speak(turns: int = 1) -> None:
    """Wait; torchrun ends this process meanwhile if another one has left."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(turns * SECONDS_BEFORE_OTHER_RANKS_SPEAK)


def _flatten(box: str) -> str:
    """The text inside the frame that the parser draws, on one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" │╰╯─|") for line in text.splitlines() if not line.startswith("╭")]
    flat = "; ".join(line for line in lines if line.strip("-"))
    return re.sub(r"([:,;]);", r"\1", flat)


def _start() -> None:
    """Prepare the streams, in UTF-8 mode: names and files mean the same in every locale."""
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    open_output()


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _thread_ended(failed: threading.ExceptHookArgs) -> None:
    """Print why a thread of a library has ended; what follows of it, the main thread will see."""
    refusal = failed.exc_value and refusal_of_system(failed.exc_value)
    if refusal:
        warnings.warn(refusal, stacklevel=2)
    else:
        threading.__excepthook__(failed)


def _one_of(names: Mapping[str, object]) -> str:
    return " or ".join(f"'{name}'" for name in names)


class OneLineWarnings:
    """Shows each warning once, however often it is given.

    Python's own count of them begins anew wherever a library changes what is shown, and a plan is
    read again when it is carried out.
    """

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(
        self, message: Warning | str, category: type[Warning], *_where: object, **_more: object
    ) -> None:
        """Print ``message``, unless it has been."""
        text = " ".join(str(message).split())
        if text not in self._shown:
            self._shown.add(text)
            print(f"warning: {escaped(text)}", file=sys.stderr, flush=True)


def _no_warning(*_arguments: object, **_more: object) -> None:
    """Every rank sees the same warning; rank 0 shows it."""
