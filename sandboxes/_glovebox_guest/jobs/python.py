"""Runs a caller's Python program the way a notebook cell runs."""

from __future__ import annotations

import _io  # `io.IOBase` is one of its subclasses
import atexit
import builtins
import gc
import os
import sys

# The source of `importlib.machinery`'s finder, without that module's own imports.
from _frozen_importlib_external import PathFinder
from errno import ENOMEM, ENOSPC
from time import sleep

from _glovebox_guest.program import cell, child
from _glovebox_guest.program.cell import NAME
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.site import sitecustomize
from _glovebox_guest.stdlib import Any, Mapping

PROXY = True
"""The program itself sends requests to the host's egress policy, through the proxy in the sandbox."""
MAX_VALUE = 65_536
"""Characters of the last expression's value: as JSON always below the bound of a job's result."""
MAX_FIGURES = 8
"""Figures returned: bounds a loop that forgets to close its figures."""
MAX_FIGURE = 8_000_000
"""Bytes of a figure returned whole: below the host's bound for a picture."""
elsewhere: Mapping[str, str] = {}
"""Environment by module that it has: from the plan, set by the guest."""
_CHARTS = ("plotly", "bokeh", "altair")
"""Libraries whose charts are pages for a browser: as a last value they show nothing."""
_WORKSPACE = "/workspace"
_NO_SHELL = 127 << 8
"""The status of system(3) where there is no shell."""
_noted: set[str] = set()
"""Failures, and windows that nobody sees, that this process's one program may not report."""
_system = os.system


class _StandardLibrary:
    """Finds standard modules before any file of the workspace, as in a notebook, whose kernel has imported them.

    So a program gets the same modules in a warm and a cold interpreter, and cannot replace those that report its
    errors.
    """

    def __init__(self, places: list[str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: object = None, _: object = None) -> Any:
        if path is None and name in sys.stdlib_module_names:
            return PathFinder.find_spec(name, self._places)
        return None


class _EmptyInput(_io.FileIO):
    """Empty standard input that notes when a program reads it."""

    def readinto(self, buffer: Any) -> int | None:
        _noted.add("input")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        _noted.add("input")
        return super().readall()


_TRIES, _PAUSE_SECONDS = 50, 0.02
"""Attempts to write an error's name while no page is free: other processes free theirs within a second, or never."""

_NO_ROOM = (MemoryError, SystemError)
"""Errors for lack of memory; CPython 3.13 now and then raises the second. Made here, while there is memory."""


def run(payload: Mapping[str, Any], emit: Emit) -> int:
    """Run ``payload["code"]``; send the last expression's value, open figures and an error's summary.

    Returns the exit status a script with this code would have had.
    """
    code = payload["code"]
    # Existing objects are not the program's: see _left_open.
    gc.freeze()
    if os.access(_WORKSPACE, os.R_OK | os.X_OK):
        os.chdir(_WORKSPACE)
        sys.meta_path.insert(0, _StandardLibrary(sys.path[:]))
        sys.path.insert(0, _WORKSPACE)
    sitecustomize.after("linecache", lambda module: _source(module, code))
    sitecustomize.install()
    program = type(sys)("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    sys.argv = [NAME]
    # `site` provides these to a program; the guest starts without it.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the site module does
    builtins.display = _display  # type: ignore[attr-defined]  # as a notebook does
    result: dict[str, Any] = {"value": None, "truncated": False, "error": None}
    try:
        value = cell.execute(code, program.__dict__)
        if value is not None:
            result["value"], result["truncated"] = _shown(value)
            if str(type(value).__module__).partition(".")[0] in _CHARTS and "/output" not in code:
                _noted.add("browser")
        status = 0
    except SystemExit as request:
        status = _exit_status(request)
    except BaseException as problem:  # noqa: BLE001 - whatever the program raises is its result
        result["error"] = _tell(problem, code, program.__dict__)
        status = 1
    try:
        figures = _send_figures(emit)
        result |= {"figures_omitted": figures} if figures else {}
    except BaseException as problem:  # noqa: BLE001 - a figure that cannot be drawn is the program's error
        if result["error"] is None:
            result["error"] = _tell(problem, code, program.__dict__)
            status = 1
    try:
        _hand_back(emit, result)
    except _NO_ROOM:
        value = None
        program.__dict__.clear()  # as in _tell
        _hand_back(emit, result)
    _finish()
    _tell_noted("" if result["error"] is None else result["error"]["message"])
    return status


def _hand_back(emit: Emit, result: Mapping[str, Any]) -> None:
    try:
        emit.value(result)
    except OSError:
        return  # the program has closed the pipe


def warm_up() -> None:
    """Do once what every program does, and discard the results."""
    stdout = sys.stdout
    with open(os.devnull, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as sink:
        sys.stdout = sink
        try:
            value = cell.execute("print(0)\n0", {"__builtins__": builtins})
        finally:
            sys.stdout = stdout
        Emit(sink.fileno()).value({"value": _shown(value)[0], "truncated": False, "error": None})


def _display(*values: Any, **_: Any) -> None:
    """Show values as the last expression is shown; open figures are returned anyway."""
    for value in values:
        if not hasattr(value, "savefig"):
            print(_shown(value)[0])


def _shown(value: Any) -> tuple[str, bool]:
    if str(type(value).__module__).startswith("plotly.") and type(value).__name__ in {"Figure", "FigureWidget"}:
        return f"<plotly {type(value).__name__}>", False  # its repr is all its numbers
    # Lines of text, a table in Markdown for instance, are read as such.
    text = value if type(value) is str and "\n" in value else repr(value)
    return text[:MAX_VALUE], len(text) > MAX_VALUE


def _exit_status(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return (request.code or 0) & 0xFF
    _print(_text(request.code))
    return 1


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - the program's own
        return f"<{type(value).__name__} that cannot be shown>"


def _print(text: str, raises: tuple[type[BaseException], ...] = ()) -> None:
    """Print to standard error, unless the program has closed or replaced it."""
    try:
        print(text, file=sys.stderr)
    except raises:
        raise
    except Exception as problem:  # noqa: BLE001 - the program's own
        # The kernel has no page for a pipe where a control group is full: not the program's doing either.
        if raises and isinstance(problem, OSError) and problem.errno == ENOMEM:
            raise MemoryError from None


def _tell(problem: BaseException, code: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Print the traceback, or the error's name where memory is short, and return its summary."""
    try:
        return _traceback(problem, code)
    except BaseException:  # noqa: BLE001 - without memory an import ends in anything: a SyntaxError of what is right, even
        # The program's objects leave no room for more than this; it has ended, so they are dropped.
        namespace.clear()
        problem.__traceback__ = None
        told = {"type": type(problem).__name__, "message": "", "line": None}
        _write(f"{told['type']}\n".encode())  # what needs the least memory
        return told


def _write(line: bytes) -> None:
    """Write to standard error, again while the kernel has no page for it; not where the program has closed it."""
    for _ in range(_TRIES):
        try:
            os.write(2, line)
        except Exception as problem:  # noqa: BLE001 - the program's own
            if isinstance(problem, OSError) and problem.errno == ENOMEM:
                sleep(_PAUSE_SECONDS)
                continue
        return


def _traceback(problem: BaseException, code: str) -> dict[str, Any]:
    """Print the traceback, reduced to the caller's own lines, and return its summary."""
    import linecache
    import traceback

    _source(linecache, code)
    if isinstance(problem, SyntaxError) and problem.filename == NAME and problem.text is None and problem.lineno:
        problem.text = linecache.getline(NAME, problem.lineno)  # what Python finds wrong in the tree has none
    summary = traceback.TracebackException.from_exception(problem, limit=-200, compact=True)
    seen: traceback.TracebackException | None = summary
    chain = 0
    line = None
    while seen is not None and chain < 10:
        own = [frame for frame in seen.stack if frame.filename == NAME]
        if line is None and own:
            line = own[-1].lineno
        seen.stack = traceback.StackSummary.from_list(own)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        chain += 1
    text = _hint(problem)
    hint = f"\n({text})" if text else ""
    _print("".join(summary.format()).rstrip() + hint, raises=_NO_ROOM)
    if isinstance(problem, SyntaxError) and problem.filename == NAME:
        line = problem.lineno
    return {"type": type(problem).__name__, "message": (_text(problem) + hint)[:2000], "line": line}


def _hint(about: BaseException | str) -> str:
    from _glovebox_guest.program import hints

    hints.elsewhere = elsewhere
    try:
        return hints.noted(about) if isinstance(about, str) else hints.hint(about)
    except _NO_ROOM:
        raise
    except Exception:  # noqa: BLE001 - of an error that the program has made, and not as others are
        return ""


def _source(module: Any, code: str) -> None:
    """Give ``linecache`` the program's lines, for tracebacks and warnings."""
    module.cache[NAME] = (len(code), None, [f"{line}\n" for line in cell.lines(code)], NAME)


def prepare() -> None:
    """Replace standard input, and patch libraries, once, to note failures that a program may not report.

    Called before a program's process is forked: there it would copy some fifty pages of memory in every call.
    """
    if os.system is _run_shell:
        return
    os.system = _run_shell
    stdin = _io.TextIOWrapper(_io.BufferedReader(_EmptyInput(0, closefd=False)), encoding="utf-8")
    child.streams.update(stdin=stdin, __stdin__=stdin)
    sitecustomize.after("warnings", _warn_as_the_program)
    sitecustomize.after("_socket", _watch_look_ups)
    sitecustomize.after("subprocess", _watch_programs)
    sitecustomize.after("webbrowser", lambda module: _note_after(module, "open"))  # bokeh's show
    sitecustomize.after("plotly.io._renderers", lambda module: _note_after(module, "show"))
    sitecustomize.install()


def _run_shell(command: Any) -> int:
    status = _system(command)
    _note_pip(command)
    if status == _NO_SHELL and not os.path.exists("/bin/sh"):
        _noted.add("shell")
    return status


def _watch_look_ups(module: Any) -> None:
    look_up = module.getaddrinfo

    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        try:
            return look_up(*args, **kwargs)
        except module.gaierror:
            if args[:1] != ("localhost",):
                _noted.add("network")
            raise

    module.getaddrinfo = getaddrinfo


def _watch_programs(module: Any) -> None:
    start = module.Popen.__init__

    def __init__(self: Any, args: Any, *more: Any, **named: Any) -> None:  # noqa: N807 - in its place
        _note_pip(args)
        start(self, args, *more, **named)

    module.Popen.__init__ = __init__
    flags = module._args_from_interpreter_flags  # noqa: SLF001 - what multiprocessing and joblib start theirs with, too
    # The guest's -I -S would keep the packages from them. Of -I, -P stays: no module from the current directory.
    module._args_from_interpreter_flags = lambda: [  # noqa: SLF001 - as above
        "-P" if flag == "-I" else flag for flag in flags() if flag != "-S"
    ]


def _note_pip(command: object) -> None:
    """Note that packages were to be installed: pip would only report that there is no module of its name."""
    if "pip" not in str(command):
        return
    from _glovebox_guest.program import hints

    if words := hints.pip(command):
        _noted.add(f"pip {' '.join(words)}")


def _note_after(module: Any, name: str) -> None:
    """Note that nobody sees what this function would have opened in a browser; it does not report that itself."""
    own = getattr(module, name)

    def show(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        _noted.add("browser")
        return result

    # Also on the package, if it was imported before the program started.
    for each in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
        if getattr(each, name, None) is own:
            setattr(each, name, show)


def _tell_noted(told: str) -> None:
    """Print the notes that the error that ended the program has not reported."""
    for text in dict.fromkeys(map(_hint, sorted(_noted))):
        if text and text not in told:
            _print(f"({text})")


def _warn_as_the_program(module: Any) -> None:
    """Attribute warnings that libraries put down to their caller, the program or its figures, to no file of ours."""
    own = module.formatwarning

    def formatwarning(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        if "/_glovebox_guest/" in filename:
            return f"{category.__name__}: {message}\n"
        text: str = own(message, category, filename, lineno, line)
        return text

    module.formatwarning = formatwarning


def _send_figures(emit: Emit) -> int:
    """Send every open matplotlib figure as PNG, and what can be shown of it; return how many were left out.

    Figures saved to ``/output`` are collected from there.
    """
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return 0
    import io

    from _glovebox_guest.files.output import MAX_PICTURES
    from _glovebox_guest.pictures import header, smaller

    numbers = pyplot.get_fignums()
    # A program may use another canvas. If more files exist than are shown, the figures are sent as well.
    saved = [each for each in numbers if getattr(pyplot.figure(each).canvas, "is_in_output", bool)()][:MAX_PICTURES]
    numbers = [each for each in numbers if each not in saved]
    drawn = []
    for number in numbers[:MAX_FIGURES]:
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
        drawn.append(buffer.getvalue())
    most = smaller.share(map(len, drawn), header.MAX_BYTES)
    # Too large ones first: a copy alone would be taken for that of the picture before it.
    for data in sorted(drawn, key=lambda each: len(each) <= MAX_FIGURE):
        if len(data) <= MAX_FIGURE:
            emit.blob("image/png", data)
        if len(data) > MAX_FIGURE or not header.fits(data, "image/png", len(data), most):
            smaller.show(emit, "", data, most)
    return max(0, len(numbers) - MAX_FIGURES)


def _finish() -> None:
    """Do what the interpreter does at its end: wait for threads, run exit handlers, flush files."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # noqa: SLF001 - the interpreter's own call, see Py_FinalizeEx
        if _leaves_thread(threading):
            _noted.add("thread")
    atexit._run_exitfuncs()  # noqa: SLF001 - as above
    streams = [(getattr(sys, name, None), "flush") for name in ("stdout", "stderr", "__stdout__", "__stderr__")]
    for file, verb in (*_left_open(), *streams):
        try:
            getattr(file, verb)()
        except BaseException as problem:  # noqa: BLE001 - closed, or none, or the program's own
            if type(problem) is OSError and problem.errno == ENOSPC:
                _noted.add("full")


def _leaves_thread(threading: Any) -> bool:
    """Return whether a daemon thread runs the program's own code; a library's idle workers do not count."""
    try:
        daemons = {each.ident for each in threading.enumerate() if each.daemon}
        frames = [frame for thread, frame in sys._current_frames().items() if thread in daemons]  # noqa: SLF001 - its only name
        while frames:
            if any(frame.f_code.co_filename == NAME for frame in frames):
                return True
            frames = [frame.f_back for frame in frames if frame.f_back is not None]
    except Exception:  # noqa: BLE001 - the program's own
        return False
    return False


def _left_open() -> list[tuple[Any, str]]:
    """Return files the program did not close, and what to call on each; text before its underlying bytes."""
    try:
        files = [each for each in gc.get_objects() if _io._IOBase in type(each).__mro__]  # noqa: SLF001 - what io.IOBase is made of
    except MemoryError:
        return []
    # A text has to hand over to the bytes beneath it, and one written in Python may have a trailer to write, as a
    # compressed file has: also into a text, which is flushed again.
    files.sort(key=lambda each: type(each).__module__ == "_io")
    files = [*(each for each in files if type(each) is _io.TextIOWrapper), *files]
    return [(each, "flush" if type(each).__module__ == "_io" else "close") for each in files]
