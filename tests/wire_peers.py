"""A wire's two ends in the middle of a job, and frames as a peer that follows no rule would write them."""

import json
import struct
from typing import Any

import pytest

from _glovebox_guest.wire import Wire

MESSAGE, OPEN, DATA, NOTE, END, RESET, CREDIT = range(1, 8)


def frame(kind: int, stream: int, payload: bytes | dict[str, Any] = b"") -> bytes:
    """A frame as a peer that follows no rule would write it."""
    body = json.dumps(payload).encode() if isinstance(payload, dict) else payload
    return struct.pack("!BII", kind, stream, len(body)) + body


def opening(stream: int, *, duplex: bool = False) -> bytes:
    """An OPEN frame."""
    return frame(OPEN, stream, {"kind": "k", "meta": {}, "duplex": duplex})


def running() -> tuple[Wire, Wire]:
    """A host and a guest between job and outcome."""
    host, guest = Wire("host"), Wire("guest")
    host.receive(guest.message("ready", {"a": 1}))
    guest.receive(host.message("job", {}))
    return host, guest


def side(role: str) -> tuple[Wire, int]:
    """One end while a job runs, and the first stream id its peer may open."""
    host, guest = running()
    return (host, 1) if role == "host" else (guest, 2)


ROLES = pytest.mark.parametrize("role", ["host", "guest"])
