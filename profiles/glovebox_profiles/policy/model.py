"""The policy as strict, frozen data: what bytes of ``policy.toml`` may say, and every default.

A role can only narrow what profiles allow. A key that is left out means the closed choice, except for the
workspace, the quota and the turns: those stay the server's. Reading the file is ``load``'s.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, create_model, model_validator

from glovebox_profiles import model
from glovebox_profiles.egress.rules import reads
from glovebox_profiles.egress.targets import parse_pattern
from glovebox_profiles.model import LISTED, Effect, Profile, Size, Table, digest_of, distinct
from glovebox_profiles.order import DIMENSIONS
from glovebox_sandboxes.plural import printable

#: A reviewer reads the whole file; longer lists are not read.
MAX_ROLES: Final = 64
MAX_RULES: Final = 32
MAX_NAMED: Final = 1024
MAX_EXAMPLES: Final = 256
#: Bounds of one budget, far above what a host can spend in a day: they keep sums exact in 64 bits.
MAX_SPENT: Final = 1 << 50

SPENDING: Final = (
    "calls", "failures", "wall_seconds", "cpu_seconds", "disclosed_bytes", "fetched_bytes", "connections", "artifacts"
)  # fmt: skip
"""Quantities that a budget can bound, in the order in which they are explained."""

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
"""Of a role, a workflow, a budget or an approval: it stands in refusals and records."""
ToolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
By = Literal["client", "operator", "either"]
"""Those who may answer: the person at the client, an operator by ``glovebox approvals``, or the first of them."""
Reach = Literal["call", "run", "caller"]
CALLER_MINUTES: Final = 60
"""Lifetime of an approval with ``reach = "caller"``: long enough for a client to reconnect."""
Window = Literal["minute", "hour", "day"]
WatchAction = Literal["record", "slow", "ask", "stop", "off"]

#: Of an approval or a grant, or the wait for one: a week at most.
_Minutes = Annotated[int, Field(ge=1, le=7 * 24 * 60)]
_Count = Annotated[int, Field(ge=1, le=MAX_SPENT)]
_Seconds = Annotated[float, Field(gt=0, le=MAX_SPENT)]
_Bytes = Annotated[int, Size, Field(ge=1, le=MAX_SPENT)]


_PRINCIPAL: Final = re.compile(
    r"local:[0-9]{1,10}|token:[a-z0-9][a-z0-9-]{0,31}|oauth:[!-\"$-~]+#(?:[A-Za-z0-9._~@|:-]|%[0-9A-F]{2})+", re.ASCII
)
_BEGUN: Final = re.compile(
    r"local:[0-9]{0,10}|token:(?:[a-z0-9][a-z0-9-]{0,31})?|oauth:[!-\"$-~]+#[A-Za-z0-9._~@|:%-]*", re.ASCII
)


def is_principal(text: str) -> bool:
    """Return whether a caller can have this id."""
    return _PRINCIPAL.fullmatch(text) is not None


def _principal(text: str) -> str:
    """Accept a principal's id, or a prefix of several that ends in a star."""
    begun = text.removesuffix("*")
    kind, colon, rest = begun.partition(":")
    if "*" in begun or not colon or kind not in ("local", "token", "oauth"):
        raise ValueError(
            'a principal is "local:1000", "token:NAME" or "oauth:ISSUER#SUBJECT"; the last part may be "*"'
        )
    if kind == "oauth" and (not rest.partition("#")[0] or "#" not in rest):
        raise ValueError('a principal of OAuth names its issuer: "oauth:ISSUER#SUBJECT", or "oauth:ISSUER#*"')
    if begun == text and not rest.partition("#")[2 if kind == "oauth" else 0]:
        raise ValueError('nobody has this name: end it in "*" if all are meant')
    if not (is_principal(text) if begun == text else _BEGUN.fullmatch(begun)):
        raise ValueError("nobody can have this name: write it as the audit log has it, character by character")
    return text


def _path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError("must be an absolute path without ..")
    return printable(text)


Principal = Annotated[str, Field(max_length=512), AfterValidator(_principal)]
_Scope = Annotated[str, Field(min_length=1, max_length=256)]
_Named = Field(max_length=MAX_NAMED)
_Host = Annotated[str, reads(parse_pattern)]
_Path = Annotated[str, Field(max_length=4096), AfterValidator(_path)]


@cache
def _partial(whole: type[Table], prefix: str = "") -> type[Table]:
    """Build a profile's tables with only the keys that grant or bound something, all optional."""
    fields: dict[str, Any] = {}
    for name, field in whole.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        if any(each.key.startswith(f"{key}.") for each in DIMENSIONS):
            kind = _partial(cast("type[Table]", kind), f"{key}.")
        elif all(each.key != key for each in DIMENSIONS):
            continue
        elif field.metadata:
            kind = cast("Any", Annotated[(kind, *field.metadata)])
        fields[name] = (kind, None)
    made = create_model(f"Narrow{'' if whole is Profile else whole.__name__}", __base__=Table, **fields)
    made.__doc__ = whole.__doc__
    return made


if TYPE_CHECKING:  # made of the profile's own keys, which the type checker cannot read
    Narrow = Table
else:
    Narrow = _partial(Profile)
"""Keys of a profile, of which a role wants less; ``model_dump(exclude_unset=True)`` has those that were given."""


class Budget(Table):
    """Bounds of spending in one window; what is counted comes back when the window has passed."""

    name: Name
    """Its id in the whole file: the rule of its refusal is `budget.NAME`."""
    per: Literal["run", "principal", "workflow", "tool"]
    """Scope of the sum: each run, principal, workflow, or of each tool for each principal."""
    every: Literal["minute", "hour", "day", "run"]
    """When it refills; `run`, only where `per` is `run` too: never within the run."""
    tool: ToolName | None = None
    """Counts this tool's calls alone. Left out: the calls of all tools."""
    calls: _Count | None = None
    """Calls that were started."""
    failures: _Count | None = None
    """Calls whose program failed, or that ended without a result."""
    wall_seconds: _Seconds | None = None
    """Real time of calls."""
    cpu_seconds: _Seconds | None = None
    """Processor time of calls."""
    disclosed_bytes: _Bytes | None = None
    """Bytes of results, which the model reads."""
    fetched_bytes: _Bytes | None = None
    """Bytes that came in from the network."""
    connections: _Count | None = None
    """Connections to hosts."""
    artifacts: _Count | None = None
    """Files that came out."""

    @model_validator(mode="after")
    def _bounds_something(self) -> "Budget":
        if all(getattr(self, each) is None for each in SPENDING):
            raise ValueError(f"must bound at least one of {', '.join(SPENDING)}")
        if self.every == "run" and self.per != "run":
            raise ValueError('every = "run" goes with per = "run" alone')
        return self


class Approval(Table):
    """Calls that wait until somebody says yes."""

    name: Name
    """Its id in the whole file: the rule of what it asks is `approval.NAME`."""
    tool: ToolName | None = None
    """Asks for this tool's calls alone. Left out: for those of all tools."""
    when: Literal["always", "leaves", "longer_than"] = "always"
    """`always`; `leaves`: an artifact would leave quarantine; `longer_than`: it may take longer than `seconds`."""
    seconds: Annotated[float, Field(gt=0, le=600)] | None = None
    """Only with `longer_than`."""
    by: By = "either"
    """People who may answer."""
    another_principal: bool = False
    """Wants a principal other than the caller's. An answer at the client, or by a command of the caller's own user, is
    the caller's."""
    quorum: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of different principals that must approve."""
    expires_minutes: _Minutes = 10
    """Minutes for which the question, and then the approval, stands."""
    reach: Reach = "call"
    """`call`: it is for one call of the run; `run`: for identical calls of the run; `caller`: for one call of the
    caller, also in another run, for an hour."""

    @model_validator(mode="after")
    def _can_be_answered(self) -> "Approval":
        if (self.seconds is None) == (self.when == "longer_than"):
            raise ValueError('seconds goes with when = "longer_than", which needs it')
        if self.by == "client" and (self.another_principal or self.quorum > 1):
            raise ValueError('at the client only the caller answers: by = "client" can give no other principal\'s yes')
        return self


class Lift(Table):
    """A denial that becomes a question: the approval is a grant, which ends by itself."""

    what: Literal["host", "tool", "budget"]
    """A public host outside the allow-list, a tool outside the role, or a spent budget."""
    by: By = "operator"
    """People who may answer."""
    expires_minutes: _Minutes = 60
    """Minutes for which the grant lasts."""


class Rate(Table):
    """Rate of connections to a host."""

    host: _Host
    """One host, or `*.example.org` for every subdomain of it."""
    connections: _Count
    """Connections in one window."""
    every: Window
    """The window."""


Rule = Budget | Approval | Lift | Rate


class Role(Table):
    """Rights of this role: never more than the profiles."""

    tools: Annotated[tuple[ToolName, ...], LISTED, Field(max_length=256), distinct()] = ()
    """Tools it may call. What is not named here, it neither sees nor calls."""
    workspace: _Path | None = None
    """Folder that its calls may read. Left out: the server's."""
    artifacts_mib: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Room of each of its principals among the artifacts. Left out: the share the server gives everybody."""
    # At most those of the server, over all callers (``broker.admission.RUNNING``).
    turns: Annotated[int, Field(ge=1, le=16)] | None = None
    """Calls of each of its principals at work at one time. Left out: as many as the server gives everybody."""
    narrow: Annotated[dict[ToolName, Narrow], Field(max_length=256)] = Field(default={})
    """Keys of a tool's profile of which it gets less."""
    budget: Annotated[tuple[Budget, ...], LISTED, Field(max_length=MAX_RULES)] = ()
    """Budgets of the role."""
    approval: Annotated[tuple[Approval, ...], LISTED, Field(max_length=MAX_RULES)] = ()
    """Calls that wait for an approval."""
    lift: Annotated[tuple[Lift, ...], LISTED, Field(max_length=3), distinct("what")] = ()
    """Denials that become questions."""
    rate: Annotated[tuple[Rate, ...], LISTED, Field(max_length=MAX_RULES), distinct("host", "every")] = ()
    """Rates of connections to hosts."""


class Promote(Table):
    """Folders for files that came out of sandboxes, once an operator has looked at them."""

    into: Annotated[dict[Name, _Path], Field(max_length=MAX_ROLES)] = Field(default={})
    """Folders by the names under which they are promoted into. Left out: nothing leaves quarantine by promotion."""


class ExampleCall(Table):
    """A call as its caller would make it."""

    tool: ToolName
    """The tool."""
    arguments: Annotated[dict[str, Any], AfterValidator(model.require_json)] = Field(default={})
    """Its arguments."""


class PolicyExample(Table):
    """One call of somebody and what policy must say to it; a policy whose examples fail does not load."""

    principal: Principal
    """The caller."""
    workflow: Name | None = None
    """For which workflow."""
    scopes: Annotated[tuple[str, ...], LISTED, Field(max_length=32)] = ()
    """Scopes of the caller's token."""
    call: ExampleCall
    """The call."""
    expect: Effect
    """Expected answer of the policy."""
    rule: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,127}$")] | None = None
    """The rule that must decide. Left out, any rule may."""


class Policy(Table):
    """The whole policy file: roles, their callers, budgets and approvals."""

    version: Literal[1]
    """Of the file's shape."""
    default: Name | None = None
    """The role of principals that are not named. Left out: they may call nothing."""
    roles: Annotated[dict[Name, Role], Field(max_length=MAX_ROLES)] = Field(default={})
    """Roles by name."""
    principals: Annotated[dict[Principal, Name], _Named] = Field(default={})
    """Roles of principals. A name in full goes before one that ends in a star, a longer one before a shorter."""
    scopes: Annotated[dict[_Scope, Name], Field(max_length=MAX_NAMED)] = Field(default={})
    """The role that a scope of an OAuth token gives."""
    workflows: Annotated[dict[Name, Name], _Named] = Field(default={})
    """The role of a workflow, which narrows the roles of its callers."""
    watch: Annotated[dict[str, WatchAction], _Named] = Field(default={})
    """Reaction of a watch rule that finds something."""
    promote: Promote = Field(default=Promote())
    """Folders to which an operator may promote files."""
    example: Annotated[tuple[PolicyExample, ...], LISTED, Field(max_length=MAX_EXAMPLES)] = ()
    """Calls that are decided at load, with the answer they must get."""

    @model_validator(mode="after")
    def _names_are_ids(self) -> "Policy":
        for table in ("budget", "approval"):
            model.require_distinct(tuple(rule for role in self.roles.values() for rule in getattr(role, table)), "name")
        return self


def effective(policy: Policy) -> dict[str, Any]:
    """Return the whole policy with every default filled in, as JSON-compatible data."""
    dumped = policy.model_dump(mode="json")
    for name, role in policy.roles.items():  # what a role does not narrow has no value there
        narrow = {tool: keys.model_dump(mode="json", exclude_unset=True) for tool, keys in role.narrow.items()}
        dumped["roles"][name]["narrow"] = narrow
    if not policy.promote.into:  # nothing was said: the digest is what it was before this could be
        del dumped["promote"]
    return dumped


def digest(policy: Policy) -> str:
    """Return ``sha256:…`` over the effective policy as canonical JSON; the roles' order counts, comments do not."""
    return digest_of({**effective(policy), "precedence": list(policy.roles)})
