"""One tool's profile as strict, frozen data: what bytes from a TOML file may say, and every default.

Every default is the closed one: a key that is left out grants nothing, keeps nothing, asks, or is the lowest limit.
So a truncated file can only be narrower than the whole. Reading files is ``loader``'s; never import
``server``.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import rfc8785
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from glovebox_profiles.egress.rules import NOT_LENT, EgressRule, PathPattern, meet, reads, require_harmless
from glovebox_profiles.egress.targets import Method, parse_pattern
from glovebox_profiles.features import refuse_unsupported
from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_sandboxes.plural import printable

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

#: Floors are what the guest needs to start and answer at all; they are the defaults too. A size of zero is never
#: allowed: the kernel reads ``size=0`` of a tmpfs as "no limit". Ceilings are the longest call and the largest sandbox
#: one host serves to several callers at once.
WALL_SECONDS: Final = (1.0, 600.0)
CPU_SECONDS: Final = (1, 600)
MEMORY: Final = (64 * MIB, 64 * GIB)
OUTPUT_BYTES: Final = (MIB, GIB)
OUTPUT_FILES: Final = (1, 1024)

#: A reviewer reads the whole list; longer ones are not read.
MAX_RULES: Final = 128
MAX_HEADERS: Final = 16
MAX_TEXT: Final = 500

if TYPE_CHECKING:  # the words are data, which the type checker cannot read
    DriverName = str
else:
    DriverName = Literal[NAMES]
Effect = Literal["allow", "deny", "ask"]
"""Effect of a policy on a call; the same words as the server's decision."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Variables that a program or its interpreter starts with: a placeholder there would be another setting.
_NOT_OURS: Final = re.compile(
    r"(LD|PYTHON|PIP|SSL|LC|MPL|GLOVEBOX)_.*|PYTHON.*|.*_PROXY|.*_CA_BUNDLE|NODE_.*|PATH|HOME|LANG|TMPDIR|TZ|USER|SHELL|IFS|ENV"
)

_BYTES = re.compile(r"([0-9]{1,12}) ?(B|KiB|MiB|GiB)")
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def parse_bytes(value: object) -> object:
    """Turn ``"512 MiB"`` into bytes; numbers pass as they are.

    Raises:
        ValueError: the text is not a number and one of B, KiB, MiB, GiB.
    """
    if not isinstance(value, str):
        return value
    if not (match := _BYTES.fullmatch(value)):
        raise ValueError('a size is a whole number of bytes or a text such as "512 MiB" (B, KiB, MiB, GiB)')
    return int(match[1]) * _UNITS[match[2]]


def require_distinct(values: tuple[Any, ...], *keys: str) -> tuple[Any, ...]:
    """Reject a list with duplicates, or with values that agree in all these attributes."""
    seen = [attrgetter(*keys)(value) if keys else value for value in values]
    for index, value in enumerate(seen):
        if value in seen[:index]:
            raise ValueError(f"{value!r} is listed twice")
    return values


def distinct(*keys: str) -> AfterValidator:
    """Return ``require_distinct`` as a validator."""
    return AfterValidator(lambda values: require_distinct(values, *keys))


def require_json(value: dict[str, Any]) -> dict[str, Any]:
    """Reject values that no client could send as JSON: dates, NaN, integers beyond 2**53."""
    try:
        rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, TypeError) as error:
        raise ValueError(f"arguments must be JSON: {error}") from None
    return value


class Table(BaseModel, extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True):
    """Base of all tables of a file: unknown keys and wrong types are errors, and nothing changes after."""


# Strictness is lifted for the list itself only (TOML has lists, frozen data has tuples); elements stay strict.
LISTED = Field(strict=False)
_Driver = Annotated[DriverName, BeforeValidator(partial(refuse_unsupported, "isolation"))]
Size = BeforeValidator(parse_bytes, json_schema_input_type=int | str)
_ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=200)]


class Revealed(Table):
    """A file or folder of the workspace that is named as secrets are, and shown all the same."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Relative to the workspace; of a folder all that is in it."""
    reason: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """Why the tool needs it, for the reviewer."""

    _is_printable = field_validator("path", "reason")(printable)

    @field_validator("path")
    @classmethod
    def _is_relative(cls, path: str) -> str:
        if any(part in {"", ".", ".."} for part in path.split("/")):
            raise ValueError('is relative to the workspace and as its files are named, such as "config/.env"')
        return path


class FileRules(Table):
    """Access to files: what the call may read, and whether it may give some back."""

    workspace: Annotated[
        Literal["none", "read", "overlay"], BeforeValidator(partial(refuse_unsupported, "files.workspace"))
    ] = "none"
    """`read` mounts the workspace read-only at /workspace. `overlay` puts a copy there that the program may change:
    what it changed comes back as a patch, the copy is thrown away, and the workspace stays as it is."""
    output: bool = False
    """Gives the program a write-only /output; what it writes there comes out as artifacts."""
    scan: bool = False
    """Has what comes out scanned for what acts when it is opened, and for secrets, before the call's result is
    given back: each file in a sandbox of its own."""
    inputs: bool = False
    """Lets the caller name artifacts of its earlier calls, which then appear read-only in /input."""
    reveal: Annotated[tuple[Revealed, ...], LISTED, Field(max_length=64), distinct("path")] = ()
    """Files and folders that are shown though their names are those of secrets, each with a reason."""


def _require_one_host(host: str) -> str:
    if "*" in parse_pattern(host):
        raise ValueError("host names one host: a credential is for no other")
    return host


def _require_source(source: str) -> None:
    kind, _, where = source.partition(":")
    if "\0" in source:
        raise ValueError("source cannot hold a NUL")
    if kind in {"file", "exec"} and not where.startswith("/"):
        raise ValueError(f"source takes an absolute path after {kind}:")
    if kind == "env" and not _VARIABLE.fullmatch(where):
        raise ValueError("source takes a variable's name after env: letters, digits and underscores")
    if kind == "exec":
        try:
            shlex.split(where)
        except ValueError as error:
            raise ValueError(f"source is no command line, as a shell splits one: {error}") from None


_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$")]
_HeaderValue = Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$", max_length=256)]


class Credential(Table):
    """A key that the broker adds to requests itself: no sandbox, record, receipt or error ever holds its value."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    """Name in records, receipts and refusals."""
    host: Annotated[str, Field(max_length=253), reads(_require_one_host)]
    """The one host it is for, reached over TLS alone; no `*`."""
    methods: Annotated[tuple[Method, ...], LISTED, Field(min_length=1), distinct()] = ("GET", "HEAD")
    """Methods of requests that get it."""
    paths: Annotated[tuple[PathPattern, ...], LISTED, Field(min_length=1), distinct()]
    """Paths that get it: exact ones, or `/repos/*` for all below; `/*` for every path."""
    header: _HeaderName | None = None
    """The header it stands in, for instance `Authorization`; else `query`."""
    query: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    """The parameter of the query it stands in; else `header`."""
    prefix: Annotated[str, Field(pattern=r"^[\x20-\x7e]*$", max_length=64)] = ""
    """Prefix of the value in its header, for instance `"Bearer "`."""
    source: Annotated[str, Field(pattern=r"^(env|file|exec):\S.*$", max_length=1024)]
    """Source of the value: `env:VARIABLE`, `file:/path` or `exec:/path/of/program`."""
    env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")] | None = None
    """The variable in which a program finds a placeholder, made for its call; with it only requests get the key in
    which the program put the placeholder where the key stands."""
    headers: Annotated[tuple[_HeaderName, ...], LISTED, Field(max_length=MAX_HEADERS)] = ()
    """Headers that a program may say itself in requests that get it, for instance `Idempotency-Key`."""
    set_headers: Annotated[dict[_HeaderName, _HeaderValue], Field(max_length=MAX_HEADERS)] = {}
    """Headers that the broker adds to requests that get it, for instance `{ Notion-Version = "2022-06-28" }`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.header is None) == (self.query is None):
            raise ValueError('takes either header or query, for instance header = "Authorization"')
        if self.header is not None and NOT_LENT.fullmatch(self.header.lower()):
            raise ValueError(f"{self.header} frames or routes a request, so no credential can stand in it")
        if self.query is not None and self.prefix:
            raise ValueError("takes a prefix in a header only")
        _require_source(self.source)
        if self.env is not None and _NOT_OURS.fullmatch(self.env):
            raise ValueError(f"env cannot be {self.env}, by which programs are set up")
        if "CONNECT" in self.methods:
            raise ValueError("methods cannot be CONNECT: in a tunnel nothing can be added")
        require_harmless((*self.headers, *self.set_headers), self.header)
        return self

    def rule(self) -> EgressRule:
        """Return which requests get it."""
        return EgressRule(host=self.host, methods=frozenset(self.methods), paths=frozenset(self.paths))


class Network(Table):
    """Access to networks. The sandbox has no network of its own either way; the broker connects on its behalf."""

    mode: Annotated[Literal["none", "egress"], BeforeValidator(partial(refuse_unsupported, "network.mode"))] = "none"
    """`egress` lets the call reach what `allow` names, decided by the broker connection by connection."""
    allow: Annotated[tuple[EgressRule, ...], LISTED, Field(max_length=MAX_RULES, validate_default=True)] = ()
    """Rules for hosts, schemes, ports, methods and paths; what no rule names is refused."""
    tls: Literal["tunnel", "inspect"] = "tunnel"
    """Treatment of programs' own TLS: `tunnel` passes it unread where a rule says `CONNECT`; `inspect` ends it in
    the sandbox everywhere else, so that each request is decided by the rules, and made by the broker."""
    # In memory at a time; documentation pages rarely pass 2 MiB, package indexes 30.
    max_bytes: Annotated[int, Size, Field(ge=64 * KIB, le=256 * MIB)] = 64 * KIB
    """Bytes of one response, unpacked; in a tunnel, bytes that come in."""
    max_redirects: Annotated[int, Field(ge=0, le=10)] = 0
    """Redirects that are followed, each decided again by the same rules."""
    max_connections: Annotated[int, Field(ge=1, le=64)] = 1
    """Connections one call may make in all, redirects included."""
    credential: Annotated[tuple[Credential, ...], LISTED, Field(max_length=16), distinct("name")] = ()
    """Keys that the broker adds to the call's requests, each a table `[[network.credential]]`."""

    @field_validator("allow")
    @classmethod
    def _fits_mode(cls, allow: tuple[EgressRule, ...], info: ValidationInfo) -> tuple[EgressRule, ...]:
        mode = info.data.get("mode")
        if mode == "none" and allow:
            raise ValueError('must be empty while mode is "none"')
        if mode == "egress" and not allow:
            raise ValueError('must name at least one host while mode is "egress"')
        return require_distinct(allow)

    @field_validator("credential")
    @classmethod
    def _can_be_used(cls, credentials: tuple[Credential, ...], info: ValidationInfo) -> tuple[Credential, ...]:
        require_distinct(tuple(each.env for each in credentials if each.env is not None))
        for each in credentials:
            if not meet(info.data.get("allow", ()), [each.rule()]):
                raise ValueError(f'"{each.name}" is for requests to {each.host} that no rule of network.allow allows')
        return credentials


class OutputLimits(Table):
    """Limits of artifacts."""

    bytes: Annotated[int, Size, Field(ge=OUTPUT_BYTES[0], le=OUTPUT_BYTES[1])] = OUTPUT_BYTES[0]
    """Size of /output, and of all artifacts of one call together."""
    files: Annotated[int, Field(ge=OUTPUT_FILES[0], le=OUTPUT_FILES[1])] = OUTPUT_FILES[0]
    """Number of artifacts of one call."""


class WorkspaceLimits(Table):
    """Limits of the copy where `files.workspace` is `overlay`; a larger workspace is refused before the program."""

    # All of it is copied before the program starts, and lies in memory: more would delay every call.
    bytes: Annotated[int, Size, Field(ge=MIB, le=GIB)] = MIB
    """Size of /workspace, in pages of 4 KiB, for the copy and what the program writes; it counts as memory."""
    files: Annotated[int, Field(ge=64, le=20_000)] = 64
    """Number of files, folders and links that are copied, and of changed files in the patch."""


class CallLimits(Table):
    """Limits of one call."""

    wall_seconds: Annotated[float, Field(ge=WALL_SECONDS[0], le=WALL_SECONDS[1])] = WALL_SECONDS[0]
    """Real time from job to outcome. A caller may ask for less, never for more."""
    cpu_seconds: Annotated[int, Field(ge=CPU_SECONDS[0], le=CPU_SECONDS[1])] = CPU_SECONDS[0]
    """Processor time of the program and its children."""
    memory: Annotated[int, Size, Field(ge=MEMORY[0], le=MEMORY[1])] = MEMORY[0]
    """Memory of all processes in the sandbox, scratch and output files included."""
    pids: Annotated[int, Field(ge=8, le=4096)] = 8
    """Processes and threads at one time."""
    processors: Annotated[int, Field(ge=1, le=8)] = 1
    """Processors that may be busy for it at one time, where there are control groups."""
    scratch: Annotated[int, Size, Field(ge=MIB, le=16 * GIB)] = MIB
    """Size of the private /tmp, gone after the call."""
    workspace: WorkspaceLimits = WorkspaceLimits()
    """Limits of the workspace's copy."""
    output: OutputLimits = OutputLimits()
    """Limits of artifacts."""
    # Twice this is held in the broker's memory and put into the result for every call in progress.
    stream: Annotated[int, Size, Field(ge=4 * KIB, le=4 * MIB)] = 4 * KIB
    """Bytes kept of stdout, and of stderr: head and tail; the gap is counted."""
    enforce: Literal["cgroup", "any"] = "cgroup"
    """`cgroup` refuses a host where limits could only be set per process; `any` accepts that."""


class Python(Table):
    """Start of the interpreter, and packages it can import."""

    environment: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = DEFAULT
    """Name of the Python packages there are: `default`, `science`, `viz`, or one of your own; see `glovebox
    environment list`."""
    start: Literal["cold", "warm"] = "cold"
    """`cold` starts an interpreter for each call when it comes. `warm` has single-use sandboxes ready; with bubblewrap
    they are forked from one interpreter, and so have its memory layout and hash seed in common."""
    preload: Annotated[tuple[_ModuleName, ...], LISTED, Field(max_length=32, validate_default=True)] = ()
    """Modules that are imported before the call arrives, so that the call does not wait for them. A program that names
    none of them and imports the standard library alone gets a sandbox without them, which is quicker."""

    @field_validator("preload")
    @classmethod
    def _fits_start(cls, preload: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if preload and info.data.get("start") == "cold":
            raise ValueError('must be empty while start is "cold"')
        return require_distinct(preload)


class Audit(Table):
    """Fields that the audit log keeps in full."""

    keep: Annotated[tuple[Literal["arguments", "stdout", "stderr", "value"], ...], LISTED, distinct()] = ()
    """Parts recorded in full; every other part is recorded by digest and size only."""


class ResultRules(Table):
    """Redaction of a call's output for its caller."""

    redact: Literal["refuse", "mask", "none"] = "mask"
    """Treatment of text that only a secret looks like: `mask` puts its kind in its place, `refuse` gives nothing of
    the call back, `none` leaves it. It goes for what the log keeps in full too."""


class ProfileExample(Table):
    """One call and what the profile must say to it; a profile whose examples fail does not load."""

    call: Annotated[dict[str, Any], Field(max_length=64), AfterValidator(require_json)]
    """Arguments of the tool."""
    expect: Effect
    """Expected answer of the policy."""
    rule: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.]{0,63}$")] | None = None
    """The rule that must decide, for instance `network.allow`; left out, any rule may."""


class Profile(Table):
    """Everything one tool may do, and the only place where it may be allowed."""

    tool: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    """The tool this profile is for; the file has the same name."""
    description: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """One sentence for the reviewer."""
    risk: Literal["low", "medium", "high"]
    """The author's judgement, for reviewers; it grants nothing."""
    isolation: Annotated[tuple[_Driver, ...], LISTED, Field(min_length=1), distinct()]
    """Acceptable drivers in order of preference. If none can enforce all of this profile, the call is refused."""
    approval: Literal["none", "ask"] = "ask"
    """`ask` holds each call until a person agrees; `none` lets calls run that the other keys allow."""
    files: FileRules = FileRules()
    """Access to files."""
    network: Network = Network()
    """Access to networks."""
    limits: CallLimits = CallLimits()
    """Limits of one call."""
    python: Python = Python()
    """Start of the interpreter, and packages it can import."""
    audit: Audit = Audit()
    """Fields that the log keeps in full."""
    result: ResultRules = ResultRules()
    """Redaction of its output."""
    example: Annotated[tuple[ProfileExample, ...], LISTED, Field(max_length=64)] = ()
    """Calls that are decided at load, with the answer they must get."""

    _is_printable = field_validator("description")(printable)


def effective(profile: Profile) -> dict[str, Any]:
    """Return the whole profile with every default filled in, as JSON-compatible data."""
    return profile.model_dump(mode="json")


def digest(profile: Profile) -> str:
    """Return ``sha256:…`` over the effective profile as canonical JSON (RFC 8785).

    Comments, order of keys, spelling of sizes and stating a default explicitly do not change it; everything else does.
    """
    return digest_of(effective(profile))


def digest_of(value: Mapping[str, Any]) -> str:
    """Return ``sha256:…`` over JSON-compatible data in canonical form (RFC 8785)."""
    return "sha256:" + hashlib.sha256(rfc8785.dumps(dict(value))).hexdigest()
