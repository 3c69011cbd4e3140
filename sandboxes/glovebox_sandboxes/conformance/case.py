"""A case: one claim, the attack on it, the expected result, and the result without the guard; and programs' texts.

The format of ``cases/*.toml``. An *attempt* is a few lines in a process of their own, in one sandbox with the others.
Its answer is ``ok``, an errno's name, an exception's, a signal's, or the value of ``answer``. A *program* has a sandbox
to itself. Both can use the names in ``PRELUDE``. Patterns are regular expressions: they match the whole of an
answer, and a part of a stream.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glovebox_sandboxes.contract.base import INPUT, OUTPUT, SCRATCH, WORKSPACE, Limits
from glovebox_sandboxes.contract.outcome import Ended

#: Of every case, unless it sets its own. Small, so that a limit is reached at once.
LIMITS = Limits(
    wall_seconds=20.0, cpu_seconds=10, memory_bytes=256 * 2**20, pids=32, scratch_bytes=16 * 2**20,
    output_bytes=4 * 2**20, output_files=8, stream_bytes=64 * 2**10, workspace_bytes=4 * 2**20, workspace_files=200,
)  # fmt: skip

_Pattern = Annotated[str, Field(max_length=1000)]


class Strict(BaseModel):
    """Base of what is read from the files: an unknown field would always hold."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Control(Strict):
    """The same attack without the guard: it works, or is stopped for the reason named here and no other."""

    where: Literal["host", "namespaces"] = "host"
    """On the host as a plain process in a scratch directory; or, for attacks that would change the host, in new
    namespaces with every capability and no other guard."""
    program: str | None = None
    answer: _Pattern = ""
    ended: Literal["exited", "signalled", "running", "printing"] = "exited"
    """``running``: it would have continued past a sandbox's time; ``printing``: past the bytes."""
    stdout: _Pattern = ""
    outlived: bool = False


class ClaimCase(Strict):
    """The common part of all cases."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    area: str = ""
    """Its subject: the name of its file, without the ending. Never written in the file."""
    claim: str
    seeds: tuple[str, ...] = Field(min_length=1)
    """Ids of the incidents it comes from: E egress, F files, I isolation, M the MCP surface."""
    proves: tuple[str, ...] = Field(min_length=1)
    """Ids of the claims in docs/operate/claims.csv that it helps to prove."""
    gaps: dict[str, str] = {}
    """Driver → why it is known not to hold there; also ``rlimits``, without control groups, and ``forked``, for forked
    sandboxes. A closed gap must be deleted."""


class Case(ClaimCase):
    """One claim about every sandbox."""

    attempt: str | None = None
    answer: _Pattern = ""
    before: str | None = None
    program: str | None = None
    overlay: bool = False
    limits: dict[str, float] = {}
    """Fields of ``Limits`` that differ from :data:`LIMITS`."""
    ended: Ended | tuple[Ended, ...] = "exited"
    """One word, or all correct ones: drivers differ in what a limit meets first."""
    code: int | None = None
    reason: _Pattern = ""
    stdout: _Pattern = ""
    stderr: _Pattern = ""
    value: _Pattern = ""
    error: str | tuple[str, ...] = ""
    """Type of the exception that ended the program, empty for none; or all correct ones."""
    dropped: bool = False
    files: dict[str, int] | None = None
    skipped: dict[str, _Pattern] = {}
    """Names that must be reported as not collected, and the reason."""
    repeated: Literal["same", "different"] | None = None
    control: Control

    @model_validator(mode="after")
    def _one_kind(self) -> "Case":
        if (self.attempt is None) == (self.program is None):
            raise ValueError("a case is either an attempt or a program")
        if self.attempt is not None and not (self.answer and self.control.answer):
            raise ValueError("an attempt needs its answer and the control's")
        return self

    def in_force(self) -> Limits:
        """Return the limits of this case's sandbox."""
        own: Any = {name: type(getattr(LIMITS, name))(value) for name, value in self.limits.items()}
        return replace(LIMITS, **own)


AnyCase = TypeVar("AnyCase", bound="ClaimCase")


def load(folder: Traversable | None = None) -> tuple[Case, ...]:
    """Return every case of the folder, by default the shipped ones, in the order of the files' names.

    Raises ValueError: a file is wrong, or two cases have the same id; names file, case and problem.
    """
    return read_all(folder or _SHIPPED, Case)


def read_all(folder: Traversable, kind: type[AnyCase]) -> tuple[AnyCase, ...]:
    """Read every ``*.toml`` of a folder as cases of this kind; raises as :func:`load`."""
    found: dict[str, AnyCase] = {}
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if not file.name.endswith(".toml"):
            continue
        try:
            whole = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(f"{file.name}: not TOML: {problem}") from None
        entries = whole.pop("case", [])
        if whole:
            raise ValueError(f"{file.name}: it may hold [[case]] entries and nothing else, not {', '.join(whole)}")
        for number, entry in enumerate(entries, 1):
            try:
                # TOML has no tuples: of JSON, a strict model takes its lists for them.
                case = kind.model_validate_json(json.dumps(entry))
            except ValidationError as problem:
                first = problem.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise ValueError(f"{file.name}: case {number}: {where}: {first['msg']}") from None
            if case.area or case.id in found:
                raise ValueError(f"{file.name}: case {case.id!r}: it is there twice, or has an area, which its file is")
            found[case.id] = case.model_copy(update={"area": file.name.removesuffix(".toml")})
    return tuple(found.values())


def digest(cases: Iterable[BaseModel]) -> str:
    """Return ``sha256:…`` over these cases: two proofs with the same one were asked the same."""
    body = json.dumps([case.model_dump(mode="json") for case in cases], sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()


_SHIPPED = resources.files(__package__).joinpath("cases")

INSIDE: Mapping[str, str] = {"WORKSPACE": WORKSPACE, "OUTPUT": OUTPUT, "INPUT": INPUT, "SCRATCH": SCRATCH}
"""The places by their names inside every sandbox; a control has them elsewhere."""
PRELUDE = "import ctypes, json, os, signal, socket, stat, subprocess, sys, time\n"
ANSWER_SECONDS = 5
"""An attempt that takes longer hangs, and answers SIGALRM: none of them waits for anything."""

_HARNESS = """
import errno, functools, json, os, signal
@functools.cache # what several cases ask alike is tried once
def _attempt(code):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        me = os.getpid()
        signal.alarm({seconds})
        names = dict(globals())
        try:
            exec(code, names)
            answer = str(names.get("answer", "ok"))
        except OSError as problem:
            answer = errno.errorcode.get(problem.errno, type(problem).__name__)
        except BaseException as problem:
            answer = type(problem).__name__
        if os.getpid() == me:  # clone(2) returns here twice
            os.write(writing, answer.encode("utf-8", "backslashreplace")[:4000])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        answer = os.read(reading, 4000).decode()
    except BlockingIOError:
        answer = ""
    os.close(reading)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else answer
print("\\n" + json.dumps({{name: _attempt(code) for name, code in json.loads({table!r}).items()}}))
"""


def program(text: str, places: Mapping[str, str], host: Mapping[str, Any]) -> str:
    """Return the text of a case's program after the names it uses: ``places`` (see :data:`INSIDE`) and ``host``."""
    names = "".join(f"{name} = {value!r}\n" for name, value in places.items())
    return f"{PRELUDE}{names}HOST = {dict(host)!r}\n{text}"


def attempts(codes: Mapping[str, str | None]) -> str:
    """Return the text of a program that makes these attempts, by id, and prints the answers."""
    return _HARNESS.format(seconds=ANSWER_SECONDS, table=json.dumps(codes))


def answers(stdout: str) -> dict[str, str]:
    """Return the printed answers of :func:`attempts`, by id. Empty if it did not get so far."""
    try:
        found = json.loads(stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        return {}
    return {str(name): str(answer) for name, answer in found.items()} if isinstance(found, dict) else {}
