"""The broker's side of a sandbox's egress streams: what the guest asks for over the wire, the gate decides.

The guest opens every stream; its kind says what for.

``request``  meta has ``method``, ``url`` and ``headers``, the data is the body. The ACCEPT has ``status``, ``headers``,
             ``url``, ``hops`` (redirects that led there) and ``dropped`` (request headers left out); then the body.
             A body that breaks off ends in a RESET with ``truncated``.
``connect``  meta has ``authority``. An ACCEPT says ``opened``, then bytes go both ways. A tunnel that ends before its
             time ends in a RESET with ``reason``.
``trust``    the answer is this machine's certificate authorities as PEM: in a tunnel a program verifies its peer.
             Where TLS ends inside the sandbox, an ACCEPT says ``inspect`` before, and the sandbox's own is among them.
``certificate``  meta has ``authority``. The ACCEPT has ``leaf``: key and certificate with which TLS to it is to be
             ended, as PEM; empty where it is to be a tunnel.

A refusal is a RESET with ``rule``, ``reason`` and ``hint``, and ``hops`` where redirects led to it.
"""

import ssl
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.authority import Authority
from glovebox_server.egress.events import refusal
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.request import request
from glovebox_server.egress.tunnel import connect, find_inspected_host


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


async def serve_stream(gate: EgressGate, stream: Duplex) -> None:
    """Serve one egress stream. Raises what ``on_decision`` raises, so that nothing is dialled without its record."""
    try:
        if stream.kind == "request":
            await _request(gate, stream, RequestMeta.model_validate(stream.meta))
        elif stream.kind == "connect":
            await connect(gate, ConnectMeta.model_validate(stream.meta).authority, stream)
        elif stream.kind == "trust":
            await _trust(gate, stream)
        elif stream.kind == "certificate" and gate.authority is not None:
            await _certificate(gate, gate.authority, stream, ConnectMeta.model_validate(stream.meta))
        else:
            await stream.reset(refusal("egress.kind", "There is no such way out.", ""))
    except ValidationError:
        hint = "A method of at most 16 characters, a URL of 8192, 64 headers."
        await stream.reset(refusal("egress.malformed", "What was asked cannot be read.", hint))


async def _request(gate: EgressGate, stream: Duplex, meta: RequestMeta) -> None:
    headers = [(pair[0], pair[1]) for pair in meta.headers if len(pair) == 2]  # noqa: PLR2004 - name and value
    body = bytearray()
    try:
        while True:
            body += await stream.receive()
            if len(body) > gate.limits.request_body_bytes:
                reason = f"The request's body is larger than {gate.limits.request_body_bytes} bytes."
                await stream.reset(refusal("egress.body", reason, "Send less."))
                return
    except anyio.EndOfStream:
        pass
    await request(gate, meta.method, meta.url, headers, bytes(body), stream=stream)


async def _trust(gate: EgressGate, stream: Duplex) -> None:
    trusted = await anyio.to_thread.run_sync(authorities)
    if gate.authority is not None:
        own = await anyio.to_thread.run_sync(gate.authority.certificate)
        await stream.accept({"inspect": True})
        trusted += own
    await stream.send(trusted)
    await stream.send_eof()


async def _certificate(gate: EgressGate, authority: Authority, stream: Duplex, meta: ConnectMeta) -> None:
    try:
        host = await find_inspected_host(gate, meta.authority)
    except RefusedError as refused:
        await stream.reset(refusal(refused.rule, refused.reason, refused.hint))
        return
    leaf = "" if host is None else await anyio.to_thread.run_sync(authority.leaf, host)
    await stream.accept({"leaf": leaf})
    await stream.send_eof()


@cache
def authorities() -> bytes:
    """Return every certificate in the system's trust store as PEM; empty if there is none.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` choose another store, here as for the gate, which uses the same one.
    """
    context = ssl.create_default_context()
    directory = ssl.get_default_verify_paths().capath
    if directory is not None:
        # OpenSSL reads such a directory only when it searches one name; its files are named <hash>.<number>.
        for path in sorted(Path(directory).glob("*.[0-9]")):
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError):
                continue  # not a certificate, or unreadable: not trusted here either
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True)).encode("ascii")
