"""Hints for a program's errors: what differs in a sandbox, and what to do instead.

For errors that the sandbox caused, and for habits of notebooks and other machines. Runs in the program's own process
after its error, so a program could print the same. Tests try each error of docs/use/mistakes.csv. Imported only when
there is an error.
"""

from __future__ import annotations

import errno
import os
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


def hint(problem: BaseException) -> str:
    """Return what the caller can do about an error; empty where the error itself says enough."""
    for each in _beneath(problem):
        for kind, tell in _KINDS:
            if (isinstance(each, kind) if isinstance(kind, type) else _named(each) == kind) and (text := tell(each)):
                return text
    return ""


def noted(what: str) -> str:
    """Return the hint for "input", "shell", "network", "browser", "thread", "full", or "pip" with its command."""
    what, _, words = what.partition(" ")
    tell: dict[str, Callable[[], str]] = {
        "input": lambda: _NOBODY,
        "shell": lambda: _SHELL,
        "network": _network,
        "browser": lambda: _PAGE,
        "thread": lambda: "A daemon thread had not ended and was stopped: join() it to have its results.",
        "full": _full,
        "pip": lambda: no_pip(words.split()),
    }
    return tell[what]()


def missing_package(name: str) -> str:
    """Return what to do without a package of this name; empty where that is not known."""
    if name.partition(".")[0] in {"tkinter", "_tkinter", "turtle", "PyQt5", "PyQt6", "PySide6", "gi", "wx"}:
        return "There is no display in this sandbox: open matplotlib figures come back as pictures by themselves."
    name = name.partition(".")[0]
    if name and _importable(name):
        return ""  # it has no such part
    others = " or ".join(_HOW.get(each, each) for each in _INSTEAD.get(name, ()) if _importable(each))
    if name in {"requests", "httpx"} and "HTTPS_PROXY" not in os.environ:
        others = "the tool fetch_url"
    instead = others and f"use {others}"
    environment = elsewhere.get(name)
    if environment is not None:
        other = f"{instead or 'do without'}, or ask the operator"
        return f"{name} is in the environment {environment}, which this tool's profile does not name: {other}."
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


def _network() -> str:
    if "HTTPS_PROXY" in os.environ:
        return "Only the HTTP proxy in HTTPS_PROXY can be reached in this sandbox."
    return (
        "There is no network in this sandbox: the tool fetch_url reads web pages, of the hosts that its profile names."
    )


def _import(problem: ImportError) -> str:
    text = _text(problem)
    if "vl-convert" in text:
        return _PAGE  # altair draws pictures with it
    lacks = isinstance(problem, ModuleNotFoundError) or "install" in text
    # pandas names what it misses in its sentence alone.
    words = (word.strip("`'\".,;:") for word in text.split())
    name = problem.name or next(filter(_misses, words), "")
    return missing_package(name) if lacks else ""


def _misses(word: str) -> bool:
    return (word in elsewhere or word in _INSTEAD) and not _importable(word)


def _system(problem: OSError) -> str:
    # These have numbers of their own.
    if _named(problem) in {"socket.gaierror", "socket.herror"}:
        # The Docker Engine has an empty file in place of the image's where there is no network.
        return _LOCALHOST if "localhost" in _lines(problem) and not os.path.getsize("/etc/hosts") else _network()
    if tell := _BY_NUMBER.get(problem.errno):
        return tell(problem)
    if _raised_in(problem, "subprocess", "_execute_child"):
        return _no_program()
    if problem.errno is not None:
        return ""
    text = _text(problem)
    if "out of pty devices" in text:
        return _TERMINAL
    # pandas checks for the folder itself.
    return _no_folder(text.rpartition(": ")[2].strip("'")) if "non-existent directory" in text else ""


def _no_folder(folder: str) -> str:
    own = os.path.abspath(folder).startswith(("/output/", "/tmp/"))  # noqa: S108 - inside the sandbox
    return f"There is no folder {folder}: os.makedirs({folder!r}, exist_ok=True) makes it." if own else _READ_ONLY


def _no_program() -> str:
    return "" if os.path.exists("/bin/sh") else _SHELL


def _missing(problem: OSError) -> str:
    if not isinstance(problem, FileNotFoundError):
        return ""  # a library's, with a number of its own
    # os.execv and its kind name no file.
    if not problem.filename or _raised_in(problem, "subprocess", "_execute_child"):
        return _no_program()
    return _not_found(os.fsdecode(problem.filename))


def _forbidden(problem: OSError) -> str:
    if str(problem.filename).startswith("/output"):
        return "/output can only be written: work in /tmp and copy the result."
    if problem.filename == "/":
        return _ROOT
    if _is_terminal(problem.filename) or (problem.filename is None and "pty(" in _lines(problem)):
        return _TERMINAL
    if closed := _closed(problem.filename):
        return closed
    if _raised_in(problem, "subprocess", "_execute_child"):
        return _no_program()
    # gVisor looks at rights first, and then at what is read-only.
    name = problem.filename
    writes = isinstance(name, str) and not name.startswith("/proc/") and _reading(name) in {0, errno.ENOENT}
    return _READ_ONLY if writes else ""


def _is_terminal(place: object) -> bool:
    return isinstance(place, str) and (place in {"/dev/tty", "/dev/ptmx"} or place.startswith("/dev/pts/"))


def _closed(place: object) -> str:
    """Return the hint where the host does not let its sandboxes read the workspace, or this part of it."""
    from _glovebox_guest.workspace import paths

    if os.path.isdir(_WORKSPACE) and not os.access(_WORKSPACE, os.R_OK | os.X_OK):
        # It was not entered, so a name relative to it is not denied but simply not there.
        closed = paths.closed()
        return f"{closed.reason} {closed.hint}"
    if not isinstance(place, str) or not os.path.abspath(place).startswith(f"{_WORKSPACE}/"):
        return ""
    if _reading(place) != errno.EACCES:
        return ""
    return _COVERED if _covered(os.path.abspath(place)) else paths.ALLOW


def _covered(place: str) -> bool:
    """Return whether a path, or a folder above it, is covered by a device or a folder without rights."""
    while place != _WORKSPACE:
        try:
            mode = os.lstat(place).st_mode
            if stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and not stat.S_IMODE(mode)):
                return True
        except OSError:
            pass  # below what is covered
        place = os.path.dirname(place)
    return False


def _reading(path: str) -> int:
    """Return the errno of opening a path for reading; 0 if it opens."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno or errno.EIO
    return 0


def _full(_: object = None) -> str:
    rooms = {place: os.statvfs(place) for place in _PLACES if os.access(place, os.W_OK | os.X_OK)}
    sizes = {place: _size(room.f_blocks * room.f_frsize) for place, room in rooms.items() if room.f_blocks}
    for place, size in sizes.items():
        if not rooms[place].f_bavail:
            return f"{place} is full, it holds {size}: {_PLACES[place]}."
    # It was full, and the truncated file has been removed by now.
    return f"Write less: {', '.join(f'{place} holds {size}' for place, size in sizes.items())}."


def _size(count: int) -> str:
    return f"{count // _MIB} MiB" if count % _MIB == 0 else f"{count} bytes"


_BY_NUMBER: dict[int | None, Callable[[OSError], str]] = {
    errno.ENETUNREACH: lambda _: _network(),
    errno.EHOSTUNREACH: lambda _: _network(),
    errno.ECONNREFUSED: lambda _: "No server or database runs in this sandbox: sqlite3 in /tmp needs none.",
    errno.EROFS: lambda _: _READ_ONLY,
    errno.EPERM: lambda problem: _SOCKETS if _raised_in(problem, "socket", "__init__") else "",
    errno.ENOSPC: _full,
    errno.EAGAIN: lambda _: _FEW,
    errno.ENOSYS: lambda _: "A sandbox has no locks of files, and lacks other calls: do without.",
    errno.ENOENT: _missing,
    errno.EACCES: _forbidden,
}

_EMPTY = {
    "/input": "Files come into /input when their artifact:// URIs are given as inputs of this call.",
    "/output": "Nothing in /output is kept from earlier calls: give their artifact:// URIs as inputs, and read /input.",
    "/tmp": "Nothing in /tmp is kept from earlier calls.",  # noqa: S108 - inside the sandbox
}
"""Places that are empty when a call begins, and how to fill them."""


def _not_found(path: str) -> str:
    """Return which existing files may have been meant."""
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
    if path.startswith(("/", "~", "\\")) or path[1:3] in {":\\", ":/"}:
        return "The host's files are not here: the workspace is /workspace, the current directory; write to /output."
    return "The workspace has no such file: list_workspace_files or os.listdir() shows what there is."


def _similar(path: str) -> list[str]:
    """Return similar names in the workspace: the same in another folder, else a typo."""
    wanted = path.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    found: dict[str, str] = {}
    same: list[str] = []
    seen = 0
    for folder, folders, files in os.walk(_WORKSPACE):
        folders.sort()
        for name in (*sorted(files), *folders):
            seen += 1
            place = os.path.relpath(os.path.join(folder, name), _WORKSPACE)
            found.setdefault(name.lower(), place)
            if name.lower() == wanted:
                same.append(place)
        if seen > _ENTRIES or len(same) >= _NAMED:
            break
    if same:
        return same[:_NAMED]
    import difflib

    return [found[name] for name in difflib.get_close_matches(wanted, list(found)[:_COMPARED], _NAMED, _SIMILAR)]


def _syntax(problem: SyntaxError) -> str:
    """Return what was meant by text that is not Python."""
    line, message = (problem.text or "").strip(), str(problem.msg)
    if line.startswith(("!pip ", "%pip ")):
        return f"{_NOTEBOOK} {no_pip(line.split())}"
    for applies, text in (
        (line.startswith("```"), "Send the program alone, without the Markdown fence around it."),
        (line.startswith("!"), _no_program() or _NOTEBOOK),
        (line.startswith("%"), f"{_NOTEBOOK} Figures come back by themselves."),
        (
            "line continuation" in message and any(mark in line for mark in ("\\n", '\\"', "\\'")),
            "The program was escaped twice: send line ends and quotes as they are, without backslashes before them.",
        ),
        (
            any(mark in line for mark in ("&lt;", "&gt;", "&amp;", "&quot;", "&#39;")),
            "The program was escaped for HTML: send < > & and quotes as they are.",
        ),
        (
            message.startswith("'return' outside"),
            "A program is no function: end it with the expression whose value is wanted, or print it.",
        ),
        (
            "outside" in message and any(word in message for word in ("'await'", "'async", "asynchronous")),
            "A function that awaits is made by `async def`; outside of functions a program may await as it is.",
        ),
    ):
        if applies:
            return text
    return ""


_NO_SUCH_NAME = {
    "get_ipython": _NOTEBOOK,
    "help": "There is no help() here: print the object's __doc__.",
    "__file__": "The program is not a file: the workspace is /workspace, the current directory.",
    **dict.fromkeys(
        ("fetch_url", "list_workspace_files", "read_workspace_file", "search_workspace"),
        "That is a tool, and no function of a program: call it by itself, not in run_python.",
    ),
    **dict.fromkeys(("true", "false", "null"), "That is JSON: Python has True, False and None; json.loads reads text."),
}


def _name(problem: NameError) -> str:
    if problem.name is None or isinstance(problem, UnboundLocalError):
        return ""
    kept = "Nothing is kept from earlier calls: a program has to import and define all that it uses."
    return _NO_SUCH_NAME.get(problem.name, kept)


def _key(problem: KeyError) -> str:
    if not _raised_in(problem, "os", "__getitem__"):
        return ""
    return "None of the host's variables, keys or tokens are in a sandbox: do without, or use os.environ.get."


def _decoding(problem: UnicodeDecodeError) -> str:
    if problem.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        return 'The file is UTF-16: give encoding="utf-16".'
    if b"\0" in problem.object:
        return 'The file is not text: open it with mode "rb", or with the library for its format.'
    return 'The file is not UTF-8: give its encoding, most often encoding="cp1252".'


_DATABASE = {
    # The first two come from how SQLite locks here (see ``site``), the third of a read-only workspace.
    "database is locked": "Who made the directory NAME.lock has the lock; a killed process leaves it there.",
    "unable to open database file": (
        "Make a database in /tmp and copy it to /output, which can only be written. One in WAL mode: PRAGMA "
        "locking_mode=EXCLUSIVE first, or immutable=1 in its URI."
    ),
    "attempt to write a readonly database": (
        "The workspace is read-only: copy the database to /tmp, and the result to /output."
    ),
}


def _running(text: str) -> str:
    # plotly draws pictures with Kaleido.
    return _FEW if "start new thread" in text else _PAGE if "the Kaleido package" in text else ""


def _raised_in(problem: BaseException, module: str, function: str) -> bool:
    place = problem.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    frame = place and place.tb_frame
    return bool(frame and frame.f_code.co_name == function and frame.f_globals.get("__name__") == module)


def _lines(problem: BaseException) -> str:
    import traceback

    return "\n".join(str(frame.line) for frame in traceback.extract_tb(problem.__traceback__))


def _named(problem: BaseException) -> str:
    return f"{type(problem).__module__}.{type(problem).__name__}"


def _text(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:  # noqa: BLE001 - the program's own
        return ""


_KINDS: tuple[tuple[type[BaseException] | str, Callable[[Any], str]], ...] = (
    (ImportError, _import),
    (OSError, _system),
    (SyntaxError, _syntax),
    (NameError, _name),
    (KeyError, _key),
    (UnicodeDecodeError, _decoding),
    (EOFError, lambda problem: _NOBODY if "reading a line" in _text(problem) else ""),
    (MemoryError, lambda _: "Load less at a time: only the columns and rows you need, or one part after another."),
    (RecursionError, lambda _: "The recursion does not end, or goes too deep: use a loop."),
    (RuntimeError, lambda problem: _running(_text(problem))),
    (ValueError, lambda problem: _PAGE if "vl-convert" in _text(problem) else ""),
    ("webbrowser.Error", lambda _: _PAGE),
    ("_pickle.PicklingError", lambda problem: _FORK if "a process that is spawned" in _text(problem) else ""),
    ("locale.Error", lambda _: "Only the locales C and C.UTF-8 are here: format numbers and dates with f-strings."),
    ("sqlite3.OperationalError", lambda problem: _DATABASE.get(_text(problem), "")),
    ("subprocess.CalledProcessError", lambda problem: no_pip(pip(problem.cmd)) if pip(problem.cmd) else ""),
)
"""Kinds of errors with their hints; a name where the class is in a module that is seldom imported."""
