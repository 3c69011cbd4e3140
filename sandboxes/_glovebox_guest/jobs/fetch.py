"""The fetch job: the host's egress policy provides the page, a child parses it.

The body is held here, in the guest's memory, until it is complete; the host enforces the profile's limit for responses.
"""

from __future__ import annotations

from time import monotonic

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Mapping

_LATE = {"rule": "egress.failed", "reason": "The call's time was up before all had come.", "hint": "Try again later."}


class _Response(StreamHandler):
    def __init__(self) -> None:
        self.head: Mapping[str, Any] | None = None
        self.body = bytearray()
        self.end: Mapping[str, Any] | None = None
        """Why it ended, ``truncated`` with None if it is whole; None before."""

    def on_accept(self, body: Mapping[str, Any]) -> None:
        self.head = body

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.end = {"truncated": None}

    def on_reset(self, body: Mapping[str, Any]) -> None:
        self.end = body


def ask(loop: Loop, payload: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """Request what ``payload`` names until ``deadline`` (monotonic seconds); return the payload of ``run``."""
    response = _Response()
    meta = {"method": payload["method"], "url": payload["url"], "headers": []}
    stream = loop.open("request", meta, response, duplex=True)
    loop.send(loop.wire.end(stream))
    while response.end is None and monotonic() < deadline:
        loop.step(deadline)
    end = response.end
    if end is None:
        loop.send(loop.wire.reset(stream))
        end = _LATE if response.head is None else {"truncated": _LATE["reason"]}
    error = None if "truncated" in end else end
    answer = {"head": response.head, "truncated": end.get("truncated"), "error": error}
    return {**answer, "body": bytes(response.body), "max_chars": payload["max_chars"], "raw": payload.get("raw", False)}


def run(payload: dict[str, Any], emit: Emit) -> None:
    """Send the head of the response and the page's readable text, or the refusal. Runs in the child."""
    error = payload["error"]
    if error is not None:
        refusal = {name: str(error.get(name, "")) for name in ("rule", "reason", "hint")}
        emit.value({"refused": refusal, "hops": list(error.get("hops", ()))})
        return
    from _glovebox_guest.web import page

    head = payload["head"]
    described = page.describe({**payload, "url": head["url"], "headers": dict(head["headers"])})
    emit.value({"head": dict(head), "page": described, "truncated": payload["truncated"]})
