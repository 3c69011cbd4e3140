"""Hints for a program's errors: what differs in a sandbox, and what to do instead.

For errors that the sandbox caused, and for habits of notebooks and other machines. Runs in the program's own process
after its error, so a program could print the same. Tests try each error of docs/use/mistakes.csv. Imported only when
there is an error.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from _glovebox_guest.stdlib import Any, Callable, Iterator, Mapping

_WORKSPACE = "/workspace"
_BENEATH = 20
"""Errors searched beneath one: causes, contexts and members of groups."""
_ENTRIES = 20_000
"""Names of the workspace that are searched for a similar one: some 50 ms."""
_COMPARED = 2000
"""Names that are compared letter by letter: some 100 ms."""
_NAMED = 3
_SIMILAR = 0.8
"""Share of common letters from which on one name may be a typo of the other."""
_MIB = 2**20

_SHELL = (
    "There is no shell and no other program in this sandbox: do it in Python, for instance with pathlib, shutil, re or "
    "zipfile; sys.executable is the interpreter."
)
_NOTEBOOK = "This is Python without a notebook's commands: leave them out."
_READ_ONLY = "Everything but /output and /tmp is read-only: write results to /output, the rest to /tmp."
_NOBODY = "Standard input is empty and nobody answers: write the value into the program."
_PAGE = (
    'There is no browser here: write a page to /output, with plotly\'s fig.write_html("/output/chart.html"), or with '
    "save() of bokeh or altair; for a picture use matplotlib."
)
_COVERED = (
    "It is named as a secret, and closed to programs: do without it, or ask the operator to show it (files.reveal in "
    "the tool's profile)."
)
_LOCALHOST = "Names are not resolved in this sandbox, not even localhost: use 127.0.0.1."
_FORK = (
    'A program here is no file that another process could import: use multiprocessing.get_context("fork").Pool, or '
    "threads, as concurrent.futures.ThreadPoolExecutor has them."
)
_TERMINAL = "There are no terminals in this sandbox: start programs with subprocess, and talk to them through pipes."
_ROOT = (
    "/ cannot be listed here: the workspace is /workspace, files of earlier calls are in /input, and /output and /tmp "
    "are for writing."
)
_SOCKETS = "TCP and UDP on 127.0.0.1 and socket.socketpair() work here; of multiprocessing's pools, those that fork."
_KEYS = "None of the host's variables, keys or tokens are in a sandbox: do without, or use os.environ.get."
_DATABASE = (
    "Make a database in /tmp and copy it to /output, which can only be written. One in WAL mode: PRAGMA "
    "locking_mode=EXCLUSIVE first, or immutable=1 in its URI."
)
_TOOLS = "^name '(fetch_url|list_workspace_files|read_workspace_file|search_workspace)'"
_FEW = "A call may have few processes and threads: use a pool of four."
elsewhere: Mapping[str, str] = {}
"""Environment by module that it has; set by the job."""
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "requests": ("urllib.request",), "httpx": ("requests", "urllib.request"),
    "PyPDF2": ("pypdf",), "pdfplumber": ("pypdf",), "fitz": ("pypdf",),
    "pyarrow": ("fastparquet",), "xlsxwriter": ("openpyxl",), "xlrd": ("openpyxl",),
    "pandas": ("polars", "duckdb"), "polars": ("pandas",), "duckdb": ("sqlite3", "pandas"),
    "plotly": ("matplotlib",), "seaborn": ("matplotlib",), "cv2": ("PIL",),
    "orjson": ("json",), "ujson": ("json",), "toml": ("tomllib",), "pytz": ("zoneinfo",),
}  # fmt: skip
"""Modules an environment may have in place of a popular one."""
_HOW = {"fastparquet": "fastparquet, with engine='fastparquet'"}
"""Usage of replacements, where it is not obvious."""
_VERSION = str.maketrans(dict.fromkeys("=<>!~[;@", " "))
"""Characters that may follow the name of a package to install."""
_PLACES = {
    "/output": "what was written last is incomplete; write less, or compress it",
    "/tmp": "remove what is no longer needed, or go through the data in parts",  # noqa: S108 - inside the sandbox
    _WORKSPACE: "write results to /output",
}


_EMPTY = {
    "/input": "Files come into /input when their artifact:// URIs are given as inputs of this call.",
    "/output": "Nothing in /output is kept from earlier calls: give their artifact:// URIs as inputs, and read /input.",
    "/tmp": "Nothing in /tmp is kept from earlier calls.",  # noqa: S108 - inside the sandbox
}
"""Places that are empty when a call begins, and how to fill them."""


def hint(problem: BaseException) -> str:
    """Return what the caller can do about an error; empty where the error itself says enough."""
    for each in _beneath(problem):
        kinds = (f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.") for kind in type(each).__mro__)
        said = _said(each)
        for pattern, tell in (row for kind in kinds for row in _HINTS.get(kind, ())):
            if re.search(pattern, said) and (text := tell if isinstance(tell, str) else tell(each)):
                return text
    return ""


def noted(what: str) -> str:
    """Return the hint for "input", "shell", "network", "browser", "thread", "full", or "pip" with its command."""
    what, _, words = what.partition(" ")
    tell = _NOTED[what]
    return tell if isinstance(tell, str) else tell(words.split())


def missing_package(name: str) -> str:
    """Return what to do without a package of this name; empty where that is not known."""
    name = name.partition(".")[0]
    if name in {"tkinter", "_tkinter", "turtle", "PyQt5", "PyQt6", "PySide6", "gi", "wx"}:
        return "There is no display in this sandbox: open matplotlib figures come back as pictures by themselves."
    if name and _importable(name):
        return ""  # it has no such part
    others = " or ".join(_HOW.get(each, each) for each in _INSTEAD.get(name, ()) if _importable(each))
    if name in {"requests", "httpx"} and "HTTPS_PROXY" not in os.environ:
        others = "the tool fetch_url"
    instead = others and f"use {others}"
    if name in elsewhere:
        other = f"{instead or 'do without'}, or ask the operator"
        return f"{name} is in the environment {elsewhere[name]}, which this tool's profile does not name: {other}."
    only = "only those of the sandbox's runtime are available"
    return f"Packages cannot be installed here; {instead or only}."


def pip(command: object) -> list[str]:
    """Return the words of a pip command; empty for another command."""
    words = command.split() if isinstance(command, str) else command if isinstance(command, (list, tuple)) else ()
    texts = [each for each in words if isinstance(each, str)]
    return texts if any(each.rpartition("/")[2] in {"pip", "pip3"} for each in texts) else []


def no_pip(command: list[str]) -> str:
    """Return what to do instead of a command such as ``pip install requests``."""
    wanted = command[command.index("install") + 1 :] if "install" in command else []
    # A version may follow the name.
    names = (each.replace("-", "_").translate(_VERSION).split()[0] for each in wanted if each[:1].isalnum())
    return next(filter(None, map(missing_package, names)), "") or missing_package("")


def _importable(name: str) -> bool:
    """Return whether this environment has a module, without importing it."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ValueError:
        return True  # the program has made it itself


def _beneath(problem: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, contexts and members, the outermost first."""
    waiting: list[object] = [problem]
    seen: list[BaseException] = []
    while waiting and len(seen) < _BENEATH:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or any(each is other for other in seen):
            continue
        seen.append(each)
        yield each
        context = None if each.__suppress_context__ else each.__context__
        group = getattr(each, "exceptions", ())  # an ExceptionGroup's
        waiting += [each.__cause__, context, getattr(each, "reason", None), *each.args]
        waiting += group if isinstance(group, tuple) else ()


def _said(problem: BaseException) -> str:
    """Return an error's text: of a system call's behind the name of its number, of wrong syntax above its line."""
    try:
        if isinstance(problem, SyntaxError):
            return f"{problem.msg}\n{(problem.text or '').strip()}"
        number = errno.errorcode.get(problem.errno or 0, "") if isinstance(problem, OSError) else ""
        return f"{number} {problem}".lstrip()
    except Exception:  # noqa: BLE001 - the program's own
        return ""


def _network(_: object = None) -> str:
    if "HTTPS_PROXY" in os.environ:
        return "Only the HTTP proxy in HTTPS_PROXY can be reached in this sandbox."
    return (
        "There is no network in this sandbox: the tool fetch_url reads web pages, of the hosts that its profile names."
    )


def _unresolved(problem: OSError) -> str:
    # The Docker Engine has an empty file in place of the image's where there is no network.
    return _LOCALHOST if "localhost" in _lines(problem) and not os.path.getsize("/etc/hosts") else _network()


def _import(problem: ImportError) -> str:
    text = _said(problem)
    # pandas names what it misses in its sentence alone.
    words = (word.strip("`'\".,;:") for word in text.split())
    missed = (word for word in words if (word in elsewhere or word in _INSTEAD) and not _importable(word))
    lacks = isinstance(problem, ModuleNotFoundError) or "install" in text
    return missing_package(problem.name or next(missed, "")) if lacks else ""


def _no_folder(folder: str) -> str:
    own = os.path.abspath(folder).startswith(("/output/", "/tmp/"))  # noqa: S108 - inside the sandbox
    return f"There is no folder {folder}: os.makedirs({folder!r}, exist_ok=True) makes it." if own else _READ_ONLY


def _no_program(_: object = None) -> str:
    return "" if os.path.exists("/bin/sh") else _SHELL


def _forbidden(problem: OSError) -> str:
    name = problem.filename if isinstance(problem.filename, str) else ""
    if name.startswith("/output"):
        return "/output can only be written: work in /tmp and copy the result."
    if name == "/":
        return _ROOT
    if name.startswith(("/dev/tty", "/dev/ptmx", "/dev/pts/")) or (not name and "pty(" in _lines(problem)):
        return _TERMINAL
    if closed := _closed(name):
        return closed
    if _raised_in(problem, "subprocess", "_execute_child"):
        return _no_program()
    # gVisor looks at rights first, and then at what is read-only.
    return _READ_ONLY if name and not name.startswith("/proc/") and _reading(name) in {0, errno.ENOENT} else ""


def _closed(place: str) -> str:
    """Return the hint where the host does not let its sandboxes read the workspace, or this part of it."""
    from _glovebox_guest.workspace import paths

    if os.path.isdir(_WORKSPACE) and not os.access(_WORKSPACE, os.R_OK | os.X_OK):
        # It was not entered, so a name relative to it is not denied but simply not there.
        closed = paths.closed()
        return f"{closed.reason} {closed.hint}"
    place = os.path.abspath(place)
    if not place.startswith(f"{_WORKSPACE}/") or _reading(place) != errno.EACCES:
        return ""
    while place != _WORKSPACE:
        try:
            mode = os.lstat(place).st_mode
        except OSError:
            mode = stat.S_IFREG  # below what is covered
        # A secret is covered by a device, or by a folder without rights.
        if stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and not stat.S_IMODE(mode)):
            return _COVERED
        place = os.path.dirname(place)
    return paths.ALLOW


def _reading(path: str) -> int:
    """Return the errno of opening a path for reading; 0 if it opens."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno or errno.EIO
    return 0


def _full(_: object) -> str:
    sizes = {}
    for place, instead in _PLACES.items():
        room = os.statvfs(place) if os.access(place, os.W_OK | os.X_OK) else None
        if room is None or not room.f_blocks:
            continue
        count = room.f_blocks * room.f_frsize
        sizes[place] = f"{count // _MIB} MiB" if count % _MIB == 0 else f"{count} bytes"
        if not room.f_bavail:
            return f"{place} is full, it holds {sizes[place]}: {instead}."
    # It was full, and the truncated file has been removed by now.
    return f"Write less: {', '.join(f'{place} holds {size}' for place, size in sizes.items())}."


def _not_found(problem: OSError) -> str:
    """Return which existing files may have been meant."""
    # os.execv and its kind name no file.
    if not problem.filename or _raised_in(problem, "subprocess", "_execute_child"):
        return _no_program()
    path = os.fsdecode(problem.filename)
    for place, text in _EMPTY.items():
        # The home directory is in /tmp.
        if path.startswith(place) and (place != os.environ.get("HOME") or not _similar(path)):
            folder = os.path.dirname(path)
            return text if place == "/input" or os.path.isdir(folder) else f"{_no_folder(folder)} {text}"
    if closed := _closed(path):
        return closed
    if not os.access(_WORKSPACE, os.R_OK | os.X_OK):
        return "No workspace is served to this tool: there are no files but those in /input."
    if similar := _similar(path):
        return f"The workspace has {', '.join(map(repr, similar))}."
    elsewhere = path.startswith(("/", "~", "\\")) or path[1:3] in {":\\", ":/"}
    return (
        "The host's files are not here: the workspace is /workspace, the current directory; write to /output."
        if elsewhere
        else "The workspace has no such file: list_workspace_files or os.listdir() shows what there is."
    )


def _similar(path: str) -> list[str]:
    """Return similar names in the workspace: the same in another folder, else a typo."""
    wanted = path.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    found: dict[str, list[str]] = {}
    seen = 0
    for folder, folders, files in os.walk(_WORKSPACE):
        folders.sort()
        seen += len(files) + len(folders)
        for name in (*sorted(files), *folders):
            found.setdefault(name.lower(), []).append(os.path.relpath(os.path.join(folder, name), _WORKSPACE))
        if seen > _ENTRIES or len(found.get(wanted, ())) >= _NAMED:
            break
    if wanted in found:
        return found[wanted][:_NAMED]
    import difflib

    return [found[name][0] for name in difflib.get_close_matches(wanted, list(found)[:_COMPARED], _NAMED, _SIMILAR)]


def _decoding(problem: UnicodeDecodeError) -> str:
    if problem.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        return 'The file is UTF-16: give encoding="utf-16".'
    if b"\0" in problem.object:
        return 'The file is not text: open it with mode "rb", or with the library for its format.'
    return 'The file is not UTF-8: give its encoding, most often encoding="cp1252".'


def _raised_in(problem: BaseException, module: str, function: str) -> bool:
    place = problem.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    frame = place and place.tb_frame
    return bool(frame and frame.f_code.co_name == function and frame.f_globals.get("__name__") == module)


def _lines(problem: BaseException) -> str:
    import traceback

    return "\n".join(str(frame.line) for frame in traceback.extract_tb(problem.__traceback__))


_NOTED: Mapping[str, str | Callable[[list[str]], str]] = {
    "input": _NOBODY,
    "shell": _SHELL,
    "network": _network,
    "browser": _PAGE,
    "thread": "A daemon thread had not ended and was stopped: join() it to have its results.",
    "full": _full,
    "pip": no_pip,
}

_HINTS: Mapping[str, tuple[tuple[str, str | Callable[[Any], str]], ...]] = {
    "ImportError": (("vl-convert", _PAGE), ("", _import)),  # altair draws pictures with it, plotly with Kaleido
    "ValueError": (("vl-convert", _PAGE),),
    "RuntimeError": (("the Kaleido package", _PAGE), ("start new thread", _FEW)),
    "webbrowser.Error": (("", _PAGE),),
    "socket.gaierror": (("", _unresolved),),
    "socket.herror": (("", _unresolved),),
    "FileNotFoundError": (("^ENOENT ", _not_found),),
    "OSError": (
        ("^(ENETUNREACH|EHOSTUNREACH) ", _network),
        ("^ECONNREFUSED ", "No server or database runs in this sandbox: sqlite3 in /tmp needs none."),
        ("^EROFS ", _READ_ONLY),
        ("^EPERM ", lambda problem: _SOCKETS if _raised_in(problem, "socket", "__init__") else ""),
        ("^ENOSPC ", _full),
        ("^EAGAIN ", _FEW),
        ("^ENOSYS ", "A sandbox has no locks of files, and lacks other calls: do without."),
        ("^EACCES ", _forbidden),
        ("", lambda problem: _no_program() if _raised_in(problem, "subprocess", "_execute_child") else ""),
        ("^out of pty devices", _TERMINAL),
        # pandas checks for the folder itself.
        ("non-existent directory", lambda problem: _no_folder(_said(problem).rpartition(": ")[2].strip("'"))),
    ),
    "SyntaxError": (
        (r"\n[!%]pip ", lambda problem: f"{_NOTEBOOK} {no_pip(problem.text.split())}"),
        (r"\n```", "Send the program alone, without the Markdown fence around it."),
        (r"\n!", lambda _: _no_program() or _NOTEBOOK),
        (r"\n%", f"{_NOTEBOOK} Figures come back by themselves."),
        (r"line continuation.*\n.*\\[n\"']", "The program was escaped twice: send line ends and quotes as they are."),
        (r"\n.*&(lt|gt|amp|quot|#39);", "The program was escaped for HTML: send < > & and quotes as they are."),
        ("^'return' outside", "A program is no function: end it with the expression whose value is wanted."),
        ("(await|async).*outside", "Use `async def` for a function that awaits; a program itself may await as it is."),
    ),
    "NameError": (
        ("^name 'get_ipython'", _NOTEBOOK),
        ("^name 'help'", "There is no help() here: print the object's __doc__."),
        ("^name '__file__'", "The program is not a file: the workspace is /workspace, the current directory."),
        (_TOOLS, "That is a tool, and no function of a program: call it by itself, not in run_python."),
        ("^name '(true|false|null)'", "That is JSON: Python has True, False and None; json.loads reads text."),
        ("^name '.*' is not", "Nothing is kept from earlier calls: a program has to import and define all it uses."),
    ),
    "KeyError": (("", lambda problem: _KEYS if _raised_in(problem, "os", "__getitem__") else ""),),
    "UnicodeDecodeError": (("", _decoding),),
    "EOFError": (("reading a line", _NOBODY),),
    "MemoryError": (("", "Load less at a time: only the columns and rows you need, or one part after another."),),
    "RecursionError": (("", "The recursion does not end, or goes too deep: use a loop."),),
    "_pickle.PicklingError": (("a process that is spawned", _FORK),),
    "locale.Error": (("", "Only the locales C and C.UTF-8 are here: format numbers and dates with f-strings."),),
    "sqlite3.OperationalError": (
        # The first two come from how SQLite locks here (see ``site``), the third of a read-only workspace.
        ("^database is locked$", "Who made the directory NAME.lock has the lock; a killed process leaves it there."),
        ("^unable to open database file$", _DATABASE),
        ("readonly", "The workspace is read-only: copy the database to /tmp, and the result to /output."),
    ),
    "subprocess.CalledProcessError": (("", lambda problem: no_pip(pip(problem.cmd)) if pip(problem.cmd) else ""),),
}
"""By class of an error or one of its bases: what its text has, and the hint. The first that is not empty counts."""
