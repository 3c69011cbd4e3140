"""Parses the trace context that a client may send, to correlate its own records with ours.

It is the caller's word: it is recorded, and decides nothing. Source: https://www.w3.org/TR/trace-context-2/. Pure.
"""

import re
from typing import Final

from glovebox_server.calls import Trace

#: Version, trace, parent, flags. A later version may add more behind another hyphen, which is ignored.
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

#: The least that a participant must pass on, and all that is kept, in characters and members.
_MAX_STATE: Final = 512
_MAX_MEMBERS: Final = 32

_MEMBER: Final = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]",
    re.ASCII,
)


def trace_of(parent: object, state: object = None) -> Trace | None:
    """Return a request's trace context; None without a valid ``traceparent``, without state if that is invalid."""
    if not isinstance(parent, str) or not _PARENT.fullmatch(parent):
        return None
    return Trace(parent=parent, state=state if isinstance(state, str) and _is_state(state) else None)


def _is_state(state: str) -> bool:
    if not 0 < len(state) <= _MAX_STATE:
        return False
    members = [each.strip(" \t") for each in state.split(",")]
    keys = [each.partition("=")[0] for each in members if each]
    sound = all(_MEMBER.fullmatch(each) for each in members if each)
    return sound and 0 < len(keys) <= _MAX_MEMBERS and len(set(keys)) == len(keys)
