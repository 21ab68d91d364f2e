"""What the command lines share: one-line errors, exit codes, progress on standard error, quiet libraries.

Results go to standard output; everything here speaks on standard error, so that a pipe stays clean.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, Protocol, TypeVar

import click

from lora_merge.errors import EXIT_INTERRUPTED, UserError
from lora_merge.readable import ESCAPED

Command = TypeVar("Command", bound=Callable[..., Any])


def reports_errors(command: Command) -> Command:
    """Decorate a click command body so that a :class:`UserError` ends in one ``error: ...`` line and its exit code.

    So does a path that lies where this user may not look, which any question about it may run into.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _terminate_like_an_interrupt()
        _print_any_path()
        try:
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
    """``text`` with every run of white space, line ends included, folded to one space."""
    return " ".join(text.split())


def note(text: str) -> None:
    """Say something to the person at the terminal, on standard error."""
    click.echo(text, err=True)


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
