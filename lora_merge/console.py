"""What the command lines share: one-line errors, exit codes, progress on standard error, quiet libraries.

Results go to standard output; everything here speaks on standard error, so that a pipe stays clean. Neither stream can end the
work: what cannot be printed is dropped, and where that was the result the command says so at its very end.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO, TypeVar, cast

import click

from lora_merge.errors import EXIT_INTERRUPTED, UserError
from lora_merge.readable import ESCAPED, printable

Command = TypeVar("Command", bound=Callable[..., Any])


def reports_errors(command: Command) -> Command:
    """Decorate a click command body so that a :class:`UserError` ends in one ``error: ...`` line and its exit code.

    So does a path that lies where this user may not look, which any question about it may run into, and so does, once everything
    else is done, a result that could not be printed.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _terminate_like_an_interrupt()
        _print_any_path()
        with _lasting_streams() as output:
            try:
                with _known_to_be_printed(output):
                    return command(*args, **kwargs)
            except UserError as error:
                click.echo(f"error: {one_line(str(error))}", err=True)
                sys.exit(error.exit_code)
            except PermissionError as error:
                click.echo(f"error: {one_line(f'{error.filename}: {error.strerror}')}; ask for access or name another", err=True)
                sys.exit(UserError.exit_code)
            except KeyboardInterrupt:
                click.echo("error: interrupted; nothing half-written was left behind", err=True)
                sys.exit(EXIT_INTERRUPTED)

    return guarded  # type: ignore[return-value]


class _Lasting:
    """A standard stream that is never in the way: what the system does not take (a full disk, a reader that is gone) is dropped.

    Attributes:
        error: why the first of it was not taken; None where all was.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._closed = stream is None
        self._stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115, until the end
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            act()
        except OSError as error:
            self.error = self.error or error

    def give_up(self) -> None:
        """Let go of what is not taken to the last, which Python would try, and complain about, when it ends."""
        if self.error is None or self._closed:
            return
        try:
            self._stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def _lasting_streams() -> Iterator[_Lasting]:
    """Standard output and error as :class:`_Lasting`, the former for the block.

    A number of theirs that is closed is opened on nothing: the next file that is opened would get it, and with it what libraries
    print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the smallest number that is free
    before = sys.stdout, sys.stderr
    lasting = _Lasting(before[0]), _Lasting(before[1])
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", lasting)
    try:
        yield lasting[0]
    finally:
        sys.stdout, sys.stderr = before
        for stream in lasting:
            stream.give_up()


@contextlib.contextmanager
def _known_to_be_printed(output: _Lasting) -> Iterator[None]:
    """A block that ends by itself, or with an exit code of its own, has printed its result or raises :class:`UserError`."""
    ended: SystemExit | None = None
    try:
        yield
    except SystemExit as end:
        ended = end
    output.flush()
    if output.error is not None:
        reason = output.error.strerror or output.error
        raise UserError(f"standard output: {reason}; the result cannot be printed, everything else was done")
    if ended is not None:
        raise ended


def _terminate_like_an_interrupt() -> None:
    """Let SIGTERM, which schedulers send, unwind like Ctrl-C, so that hidden folders are removed."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def _print_any_path() -> None:
    """Let a path with bytes that are no UTF-8 be printed, as everything writes it (:mod:`lora_merge.readable`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def one_line(text: str) -> str:
    """``text`` with every run of white space, line ends included, folded to one space, and control characters written out."""
    return printable(" ".join(text.split()))


def say(text: str) -> None:
    """Print one line of a result on standard output."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Say something to the person at the terminal, on standard error."""
    click.echo(printable(text), err=True)


def warn(text: str) -> None:
    """Say something that the person must not overlook, on standard error."""
    click.echo(f"warning: {one_line(text)}", err=True)


class Progress(Protocol):
    """Called with the number of units (bytes, prompts) finished since the last call."""

    def __call__(self, advance: float) -> None: ...


def no_progress(advance: float) -> None:
    """The :class:`Progress` that shows nothing; the default of every library function."""


@contextlib.contextmanager
def progress_bar(description: str, total: float, *, unit: str = "items", quiet: bool = False) -> Iterator[Progress]:
    """A rich progress bar on standard error; silent when ``quiet`` or when standard error is no terminal.

    ``unit`` is ``"bytes"`` for sizes and speeds, anything else for a plain count.
    """
    if quiet or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    counters = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *counters, TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance_bar(advance: float) -> None:
            bar.advance(task, advance)

        yield advance_bar


_libraries_are_quiet = False


@contextlib.contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Keep what libraries write to standard error off the screen, from C++ and from processes started meanwhile too.

    Where the body fails, what was kept is shown: it says why. Nothing is kept unless :func:`quiet_libraries` was called, so a
    library user sees everything.
    """
    if not _libraries_are_quiet:
        yield
        return
    with tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        screen = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            os.dup2(screen, 2)
            kept.seek(0)
            with contextlib.suppress(OSError):
                while chunk := kept.read(1 << 16):
                    os.write(2, chunk)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)


def quiet_libraries(verbose: bool = False) -> None:
    """Keep other libraries' chatter (progress bars, warnings, info logs) off the screen unless ``verbose``.

    Call it before ``transformers`` or ``vllm`` is imported: both read their log level from the environment at import.
    """
    global _libraries_are_quiet
    _libraries_are_quiet = not verbose
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the processes that libraries start
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
