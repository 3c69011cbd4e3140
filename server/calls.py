"""The records one call is made of: who calls, what is asked, what was decided. Frozen data, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Effect = Literal["allow", "deny", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls. Artifacts and resources belong to a principal and are invisible to every other."""

    id: str
    """Stable name: ``local:<uid>`` for the parent process over stdio and the command line, ``token:<name>`` over HTTP."""
    transport: Literal["stdio", "http", "sse", "cli"]
    client: str | None = None
    """What the client calls itself: self-reported, for the record only, never a ground for a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One validated request to run one tool."""

    id: str
    """``c_`` and 26 lower-case characters: unique, sortable by time."""
    principal: Principal
    session: str | None
    tool: str
    arguments: Mapping[str, Any]
    """Already validated by the tool's argument model; JSON-compatible."""
    received: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What policy says about one call, before anything starts."""

    effect: Effect
    rule: str
    """Id of the rule that decided, e.g. ``limits.wall_seconds``."""
    reason: str
    """One sentence for the caller."""
    hint: str
    """What would be allowed, or how to ask."""
    profile_digest: str
    """``sha256:…`` of the profile that was in force; empty when there is none."""
