"""What a person is asked before a call may run, and what they say. Frozen data and one digest, no I/O.

Must never be imported here: a store, or anything of MCP.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, Literal

import rfc8785

By = Literal["client", "operator", "either"]
"""Whose answer counts: the person's at the MCP client, one given out of band, or the first of both."""
Channel = Literal["client", "operator"]
"""How an answer came: from the MCP client by elicitation, or out of band, as by the command line."""
Reach = Literal["call", "run", "caller"]
"""How far a yes goes: one call of the run, identical calls of the run, or one call of the caller in whichever run."""
MAX_REASON: Final = 500
"""Characters of why somebody said no: the model reads it."""
Lifted = Literal["host", "tool", "budget"]
"""Denials that policy may turn into a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredApproval:
    """Who has to say yes, and how far that yes goes."""

    by: By = "either"
    """Whose answer counts."""
    quorum: int = 1
    """How many different principals have to say yes."""
    another_principal: bool = False
    """Whether the caller's own answer, by whatever way it comes, does not count."""
    reach: Reach = "call"
    """How far a yes goes at most."""
    teaches: bool = False
    """Whether after a yes the same program, or the same hosts in the run, are not asked about again."""
    minutes: float = 10
    """How long the question, and a yes to it, is good for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSubject:
    """Everything that a yes is bound to: one that differs in any part is another question."""

    principal: str
    """Id of the caller."""
    run: str
    """Id of the caller's run."""
    tool: str
    """Name of the tool."""
    arguments: str
    """The validated arguments as canonical JSON (RFC 8785): what will run, whole."""
    profile_digest: str
    """Digest of the profile in force for the caller, narrowed by its role."""
    policy_digest: str
    """Digest of policy.toml; empty where there is none."""
    inputs: tuple[tuple[str, str], ...] = ()
    """Address and SHA-256 of each artifact that goes in."""
    workspace: str
    """Which directory is served, by device, inode and a digest of its path; empty where none is. Not its content."""
    environment: str
    """Digest of the Python environment that the program would import from; empty where the tool has none."""
    rules: tuple[str, ...]
    """Ids of the rules that ask, e.g. ``approval.programs``: a yes to one is none to another."""
    lifted: Lifted | None = None
    """What kind of denial the yes would lift; None where nothing is denied."""
    target: str = ""
    """What exactly would be lifted: ``host:port``, the tool's name, the budget's name."""

    changes: str = ""
    """What the call would change on the host, whole, as its approver reads it; empty where it changes nothing."""
    any_run: bool = False
    """Whether a yes is bound to the caller and not to ``run``, which is then that of the call that asked first."""

    @property
    def digest(self) -> str:
        """``sha256:…`` over all of it as canonical JSON (RFC 8785); ``changes`` only where there are some."""
        fields = asdict(self)
        if self.any_run:
            del fields["run"]
        else:  # earlier versions had no other
            del fields["any_run"]
        if not self.changes:  # earlier versions had none
            del fields["changes"]
        return digest_of(rfc8785.dumps(fields).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to a person: may this call, exactly as it stands here, run."""

    id: str
    """``a_`` and 26 lower-case characters, made as call ids are."""
    digest: str
    """Digest of ``subject``: what an answer answers."""
    subject: QuestionSubject
    """What a yes is bound to, the program included."""
    asked: RequiredApproval
    """Who has to say yes."""
    why: str
    """Why it is asked, in a sentence of ours; nothing in it is the caller's."""
    client: str | None
    """What the client calls itself: self-reported."""
    workflow: str | None
    """The workflow the call belongs to."""
    profile: str
    """The effective profile as canonical JSON, for ``Profile.model_validate_json``: what the call may do. Empty where
    there is none."""
    made: datetime
    """When it was first asked."""
    expires: datetime
    """From then on no answer counts, and a yes is good for nothing."""
    asked_by: str = ""
    """The call that asked first."""
    folder: str = ""
    """Path of the folder on this host that the call could read or would change: for an operator, never for a client."""
    last_approved: str | None = None
    """Arguments, as canonical JSON, of the caller's last approved call of this tool; None before the first."""

    @property
    def workspace_may_change(self) -> bool:
        """Whether the call can read workspace files, which may change after the answer: the approver is told."""
        return bool(self.subject.workspace)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAnswer:
    """What one person said to a question."""

    allow: bool
    """Yes or no."""
    by: str
    """Principal of who said it: an elicited answer is the caller's own."""
    channel: Channel
    """How it came."""
    reach: Reach = "call"
    """How far it shall go; never further than the question's ``asked.reach``."""
    digest: str
    """Digest of the question that was answered: one to another question is refused, and uses nothing up."""
    reason: str = ""
    """Why, for the model, in at most ``MAX_REASON`` printable characters; only of a no."""


def canonical(arguments: Mapping[str, Any]) -> str:
    """Return validated arguments as canonical JSON (RFC 8785).

    Not ``audit.chain.canonical``, which writes what JSON cannot hold as text that could also stand for itself: two
    programs would have one digest.

    Raises:
        ValueError: they hold what canonical JSON cannot, such as half of a surrogate pair: nobody can be shown that.
    """
    return rfc8785.dumps(dict(arguments)).decode()


def digest_of(text: str) -> str:
    """Return ``sha256:…`` of a text in UTF-8."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
