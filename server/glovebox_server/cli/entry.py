"""The outermost entry of ``glovebox``: what holds for every command. No traceback gets past it.

Imports little before ``run`` has begun, so that errors of the installation are reported here too.
"""

import contextlib
import errno
import gc
import hashlib
import io
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from glovebox_audit.printable import LAYOUT, printable
from glovebox_server.cli import COMPLETE
from glovebox_server.errors import InternalError, OutputError
from glovebox_server.exits import ENDING, INTERRUPTED, NOBODY_READS, OK, UNAVAILABLE, UNFORESEEN, signal_name


class _Standard(io.FileIO):
    """Standard output or error, which may be a closed pipe, a full disk, or missing."""

    def __init__(self, descriptor: int, *, needed: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure: OSError | None = None
        self._needed = needed

    def write(self, data: Any, /) -> int:
        """Write; after a failure, drop what is left in buffers."""
        if self.failure is None:
            try:
                while (written := super().write(data)) is None:  # made non-blocking by a process that shares it
                    select.select([], [self], [])
            except OSError as error:
                self.failure = error
                if self._needed:
                    raise OutputError from error
            else:
                return written
        return memoryview(data).nbytes


class _OneEntry(logging.Formatter):
    """Formats libraries' log entries, which quote peers, where no log is set up; as ``transport.logs`` does."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one entry, without its arguments if they do not fit."""
        try:
            text = super().format(record)
        except Exception:  # noqa: BLE001 - the standard library would print it all as it is
            text = str(record.msg)
        return printable(text, "\n").replace("\n", "\n    | ")


def run() -> NoReturn:
    """Run the command line of this process and exit."""
    gc.disable()  # until the command's modules are imported: see ``LazyGroup``
    received: list[int] = []
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as ``__main__`` leaves it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _end_as_if_interrupted(received)
        output = _standard_streams()
        if logging.lastResort:
            logging.lastResort.setFormatter(_OneEntry())
        code = _guarded(_command_line)
        code = _guarded(lambda: _printed(output)) or code
    except KeyboardInterrupt:
        code = INTERRUPTED
    # Nothing is left to take down: a further signal just ends the process.
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if code == INTERRUPTED:
        code = 128 + received[0] if received else INTERRUPTED
        name = signal_name(code - 128)
        with contextlib.suppress(AttributeError):  # closed so early that no other exists yet
            _say(f"glovebox was ended by {name}; the same command begins anew.\n")
    sys.exit(code)


def _end_as_if_interrupted(received: list[int]) -> None:
    """Make every ending signal take everything down like SIGINT, and note it in ``received``."""

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may want it to be ignored
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
                signal.signal(number, interrupt)


def _standard_streams() -> _Standard:
    """Open all three standard streams, even if closed or of a limited locale; return standard output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Else the first file we open would take its place. Writing to a closed output must fail.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # noqa: PLR2004 - standard error
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    output = _Standard(1, needed=True)
    sys.stdout = _text(output, sys.stdout)
    sys.stderr = _text(_Standard(2, needed=False), sys.stderr)
    return output


def _text(raw: _Standard, replaced: TextIO | None) -> io.TextIOWrapper:
    encoding = getattr(replaced, "encoding", None) or "utf-8"
    # File names may hold any bytes, and an old locale has no arrows: both are printed as escapes.
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)


def _command_line() -> int:
    try:
        import click  # noqa: PLC0415 - see the module's header

        from glovebox_server.cli.main import main  # noqa: PLC0415 - see the module's header

        if instruction := os.environ.get(COMPLETE):
            from click.shell_completion import shell_complete  # noqa: PLC0415 - only here

            return shell_complete(main, {}, "glovebox", COMPLETE, instruction)
        try:
            with main.make_context("glovebox", sys.argv[1:]) as context:
                main.invoke(context)
        except click.exceptions.Exit as done:
            return done.exit_code
        except click.ClickException as problem:
            shown = io.StringIO()
            problem.show(shown)
            _say(shown.getvalue())
            return problem.exit_code
    except (ImportError, SyntaxError) as problem:  # of a command's module; one of a running command is an InternalError
        words = "This installation is incomplete, or was made for another Python: install Glovebox again."
        _say(f"glovebox cannot start with {sys.executable}: {problem}. {words}\n")
        return UNAVAILABLE
    return OK


def _say(words: str) -> None:
    sys.stderr.write(printable(words, LAYOUT))


def _printed(output: _Standard) -> int:
    """Flush buffers; return ``OK`` if all of it was written."""
    with contextlib.suppress(OutputError):
        sys.stdout.flush()
    if output.failure is None:
        return OK
    if isinstance(output.failure, BrokenPipeError):
        return NOBODY_READS
    words = "Send it to a place that takes it; what was done is done."
    _say(f"Standard output cannot be written: {output.failure.strerror}. {words}\n")
    return UNAVAILABLE


def _guarded(act: Callable[[], int]) -> int:
    try:
        return act()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else OK
    except BaseException as raised:  # noqa: BLE001 - the outermost entry
        if _holds(raised, OutputError):
            return UNAVAILABLE
        return INTERRUPTED if _interrupted(raised) else _last_resort(raised)


def _holds(raised: BaseException, kind: type[BaseException]) -> bool:
    found = raised.__cause__ if isinstance(raised, InternalError) else raised
    return isinstance(found, kind) or (isinstance(found, BaseExceptionGroup) and found.subgroup(kind) is not None)


def _interrupted(raised: BaseException) -> bool:
    """Return whether it is an interrupt, or an error of taking things down after one."""
    found: BaseException | None = raised
    while found is not None:
        if _holds(found, KeyboardInterrupt) or type(found).__name__ == "CancelledError":
            return True
        found = found.__cause__ or found.__context__
    return False


def _last_resort(raised: BaseException) -> int:
    """Keep an internal error in the state directory, else below ``/tmp``, and print the path."""
    doing, state_dir, cause = "starting", None, raised
    if isinstance(raised, InternalError) and raised.__cause__ is not None:
        doing, state_dir, cause = raised.doing, raised.state_dir, raised.__cause__
    story = "".join([f"{doing}\n", *traceback.format_exception(cause)])
    # Named by where it happened: repeated errors share one file.
    places = "".join([type(cause).__name__, *traceback.format_tb(cause.__traceback__)]).encode(errors="replace")
    name = f"unforeseen-{hashlib.sha256(places).hexdigest()[:8]}.txt"
    kept = "There is no place for its details."
    for directory in (state_dir, Path(f"/tmp/glovebox-{os.geteuid()}")):  # noqa: S108 - checked to be our own
        if directory is not None:
            with contextlib.suppress(OSError):
                _keep(directory, name, story)
                kept = f"Details: {directory / name}."
                break
    _say(f"Internal error while {doing}. {kept} Please report it.\n")
    return UNFORESEEN


def _keep(directory: Path, name: str, story: str) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(place).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=place)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(story)
    finally:
        os.close(place)
