"""A stop: what it names, why, and as a file in ``governance/stops/``. A file that is not a stop stops everything."""

import re
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from pydantic import AwareDatetime, Field

from glovebox_audit.chain import new_call_id
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import ToolCall
from glovebox_server.secret_files import FOLDER, Files, StoredItem

Scope = Literal["call", "run", "principal", "workflow", "tool", "all"]
"""Kinds of names in a stop."""
SCOPES: tuple[Scope, ...] = get_args(Scope)

KIND = "stop"
"""For errors."""
MAX_STOPS = 1024
"""In effect at one time: each call is compared with each, and one that names a principal does the work of many."""
SPARE_STOPS = 64
"""Reserved for the operator: watch rules make no more when the others are used up."""
MAX_BECAUSE = 500
"""Characters of a reason: every caller that is stopped reads it."""
_MAX_NAME = 640
"""Characters of a name: principals of OAuth issuers are the longest."""

HINT = "Ask the operator: nothing you can change lifts it."
"""Callers read it beside the reason."""
BY_RULES = "Stopped by the operator's rules."
"""All that callers read of a watch rule's stop: the rule's name would help a program to evade it."""
DAMAGED = Refusal(
    rule="store",
    reason="What is stopped cannot be read, so everything is.",
    hint="The operator finds the fix with `glovebox stops list`.",
)
"""Callers read it if a stop is damaged: it may name them."""

_ID = re.compile(r"s_[0-9a-z]{26}", re.ASCII)


class Stop(StoredItem):
    """One stop, in effect until it is resumed."""

    id: str = Field(pattern=r"^s_[0-9a-z]{26}$")
    """``s_`` and 26 lower-case characters, made as call ids are."""
    scope: Scope
    name: str = Field(max_length=_MAX_NAME)
    """Exactly what is stopped; empty for everything."""
    because: str = Field(min_length=1, max_length=MAX_BECAUSE)
    """The reason, for the operator and for stopped callers."""
    by: str = Field(min_length=1, max_length=_MAX_NAME)
    """A principal, or ``watch:`` and the rule."""
    made: AwareDatetime

    def names(self, call: ToolCall) -> bool:
        """Return whether it stops this call."""
        whose = {
            "call": call.id,
            "run": call.run,
            "principal": call.principal.id,
            "workflow": call.principal.workflow,
            "tool": call.tool,
        }
        return self.scope == "all" or whose[self.scope] == self.name

    @property
    def refusal(self) -> Refusal:
        """Return the refusal of the calls it stops."""
        if self.by.startswith("watch:"):
            return Refusal(rule="stop", reason=BY_RULES, hint=HINT)
        words = "Everything is stopped" if self.scope == "all" else f"This {self.scope} is stopped"
        return Refusal(rule="stop", reason=f"{words}: {self.because.rstrip('.')}.", hint=HINT)

    def encoded(self) -> bytes:
        """Encode it for its file."""
        return self.model_dump_json().encode()


def new_stop(scope: Scope, name: str, *, because: str, by: str, made: datetime) -> Stop:
    """Make a stop with an id of its own.

    Raises:
        ValidationError: the reason or the name is empty or too long.
    """
    return Stop(id=f"s_{new_call_id()[2:]}", scope=scope, name=name, because=because, by=by, made=made)


def is_id(name: str) -> bool:
    """Return whether this can be a stop's id."""
    return _ID.fullmatch(name) is not None


def stops_of(state_dir: Path) -> Files[Stop]:
    """Return the stops of a state directory."""

    def fix(path: Path) -> str:
        return f"Run `glovebox resume {path.name}`, which lifts it." if is_id(path.name) else f"Remove {path}."

    return Files(state_dir / FOLDER / "stops", Stop, fix=fix, kind=KIND, most=MAX_STOPS)
