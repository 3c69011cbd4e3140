"""Approval questions and answers. Frozen data and one digest, no I/O.

Must never be imported here: a store, or anything of MCP.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, Literal

import rfc8785

from glovebox_profiles.policy.model import By, Reach

Channel = Literal["client", "operator"]
"""Channel of an answer: elicitation by the MCP client, or out of band, as by the command line."""
MAX_REASON: Final = 500
"""Characters of a denial's reason: the model reads it."""
Lifted = Literal["host", "tool", "budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredApproval:
    """The approval that a rule requires."""

    by: By = "either"
    quorum: int = 1
    another_principal: bool = False
    """The caller's own answer does not count, by whatever channel."""
    reach: Reach = "call"
    minutes: float = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSubject:
    """Everything that an approval is bound to: any difference makes another question."""

    principal: str
    run: str
    tool: str
    arguments: str
    """The validated arguments as canonical JSON (RFC 8785): what will run, whole."""
    profile_digest: str
    """Digest of the profile in effect for the caller, narrowed by its role."""
    policy_digest: str
    inputs: tuple[tuple[str, str], ...] = ()
    workspace: str
    """Device, inode and digest of the path of the served directory; empty without one. Not its content."""
    environment: str
    """Digest of the Python environment that the program imports from; empty if the tool has none."""
    rules: tuple[str, ...]
    """Ids of the rules that ask, e.g. ``approval.programs``: an approval of one is none of another."""
    lifted: Lifted | None = None
    target: str = ""
    """``host:port``, the tool's name, or the budget's name."""

    changes: str = ""
    """The complete changes on the host, as the approver reads them; empty without any."""
    any_run: bool = False
    """The approval is bound to the caller, not to ``run``, which is the run of the first call."""

    @property
    def digest(self) -> str:
        """Return ``sha256:…`` over all of it as canonical JSON (RFC 8785), without a run that it is not bound to."""
        fields = asdict(self) | ({"run": ""} if self.any_run else {})
        return digest_of(rfc8785.dumps(fields).decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a person: may this exact call run."""

    id: str
    """``a_`` and 26 lower-case characters, made as call ids are."""
    digest: str
    subject: QuestionSubject
    asked: RequiredApproval
    why: str
    """The server's sentence; nothing in it is the caller's."""
    client: str | None
    workflow: str | None
    profile: str
    """The effective profile as canonical JSON, for ``Profile.model_validate_json``; empty without one."""
    made: datetime
    expires: datetime
    """From then on no answer counts, and an approval is void."""
    asked_by: str = ""
    folder: str = ""
    """Host path that the call could read or would change: for an operator, never for a client."""
    last_approved: str | None = None
    """Canonical JSON of the caller's last approved call of this tool; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAnswer:
    """One person's answer to a question."""

    allow: bool
    by: str
    """Principal of the person: an elicited answer is the caller's own."""
    channel: Channel
    reach: Reach = "call"
    digest: str
    """Digest of the answered question: another is refused, and uses nothing up."""
    reason: str = ""
    """For the model, at most ``MAX_REASON`` printable characters; only of a denial."""
    after: float = 0.0
    """Seconds that the question was open; set by the store."""


def canonical(arguments: Mapping[str, Any]) -> str:
    """Return validated arguments as canonical JSON (RFC 8785).

    Not ``audit.chain.canonical``, which writes what JSON cannot hold as text that could also stand for itself: two
    programs would have one digest.

    Raises ValueError: canonical JSON cannot hold them, as with unpaired surrogates, which cannot be displayed.
    """
    return rfc8785.dumps(dict(arguments)).decode()


def digest_of(text: str) -> str:
    """Return ``sha256:…`` of a text in UTF-8."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
