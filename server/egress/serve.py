"""The broker's side of a sandbox's egress streams: what the guest asks for over the wire, the gate decides.

Two kinds of stream, both opened by the guest: ``request`` (its meta has ``method``, ``url``, ``headers``; its data is
the body) and ``connect`` (``authority``). The answer is one NOTE and then data; a refusal is a RESET with ``rule``,
``reason`` and ``hint``; a body that was cut short ends in a RESET with ``truncated``.
"""

from collections.abc import Mapping
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandboxes.link import Duplex
from server.egress.events import Body, Denied, End, Failed, Head, Opened, RequestEvent, TunnelEvent
from server.egress.exchange import request
from server.egress.gate import EgressGate
from server.egress.tunnel import connect


class RequestMeta(BaseModel):
    """Meta of a ``request`` stream, as the guest sent it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str = Field(max_length=16)
    url: str = Field(max_length=8192)
    headers: list[list[str]] = Field(default_factory=list, max_length=64)


class ConnectMeta(BaseModel):
    """Meta of a ``connect`` stream, as the guest sent it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    authority: str = Field(max_length=512)


async def serve(gate: EgressGate, stream: Duplex) -> None:
    """Serve one egress stream to its end.

    Raises:
        Exception: what the gate's ``on_decision`` raises, so that nothing is dialled without its record.
    """
    try:
        if stream.kind == "request":
            await _request(gate, stream, RequestMeta.model_validate(stream.meta))
        elif stream.kind == "connect":
            await _connect(gate, stream, ConnectMeta.model_validate(stream.meta))
        else:
            await stream.reset(_refusal("egress.kind", "There is no such way out.", ""))
    except ValidationError:
        await stream.reset(_refusal("egress.malformed", "What was asked cannot be read.", ""))


async def _request(gate: EgressGate, stream: Duplex, meta: RequestMeta) -> None:
    headers = [(pair[0], pair[1]) for pair in meta.headers if len(pair) == 2]  # noqa: PLR2004 - name and value
    body = bytearray()
    try:
        while True:
            body += await stream.receive()
            if len(body) > gate.limits.request_body_bytes:
                reason = f"The request's body is larger than {gate.limits.request_body_bytes} bytes."
                await stream.reset(_refusal("egress.body", reason, "Send less."))
                return
    except anyio.EndOfStream:
        pass

    async def send(event: RequestEvent) -> None:
        match event:
            case Head():
                hops = [{"status": hop.status, "url": hop.url} for hop in event.hops]
                await stream.note({"status": event.status, "headers": event.headers, "url": event.url, "hops": hops})
            case Body():
                await stream.send(event.data)
            case End(truncated=None):
                await stream.send_eof()
            case End():
                await stream.reset({"truncated": event.truncated})
            case Denied():
                decision = event.decision
                await stream.reset(_refusal(decision.rule, decision.reason, decision.hint))
            case Failed():
                await stream.reset(_refusal("egress.failed", event.reason, "Try again later, or another address."))

    await request(gate, meta.method, meta.url, headers, bytes(body), send=send)


async def _connect(gate: EgressGate, stream: Duplex, meta: ConnectMeta) -> None:
    async def send(event: TunnelEvent) -> None:
        match event:
            case Opened():
                await stream.note({"opened": True})
            case Denied():
                decision = event.decision
                await stream.reset(_refusal(decision.rule, decision.reason, decision.hint))
            case _:
                await stream.aclose()

    await connect(gate, meta.authority, stream, send=send)


def _refusal(rule: str, reason: str, hint: str) -> Mapping[str, Any]:
    return {"rule": rule, "reason": reason, "hint": hint}
