"""Artifacts over plain HTTP: ``GET /artifacts/{id}``, whole or a range, for clients that save files without MCP.

The gate has identified the caller, who gets its own artifacts; everything else is the same 404. A browser never runs
the answer: it is saved, under a type that the bytes allow.
"""

import json
import re
from collections import Counter
from typing import Any, Final
from urllib.parse import quote

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.sharing import FairLimiter
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError, uri_of
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.requests import Refusals
from glovebox_server.transport.auth import PRINCIPAL_SCOPE_KEY

PATH: Final = "/artifacts/{identifier}"
#: Artifacts checked against their digests at one time, in fair turns: each is read whole before its first byte is sent.
CHECKERS: Final = 2
#: Artifacts being sent to one caller at a time; each holds a descriptor and a piece.
MAX_DOWNLOADS: Final = 4
#: Bytes sent at once: a client that does not read leaves about twice that in memory.
PIECE_BYTES: Final = 64 * 1024
#: Seconds in which a client has to take a piece.
PIECE_SECONDS: Final = 30.0
#: Characters of an artifact's risks in a header, which clients bound; reading over MCP gives all.
MAX_RISKS: Final = 2048
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


class Downloads:
    """The ASGI application behind ``PATH``."""

    def __init__(self, artifacts: ArtifactStore, refusals: Refusals) -> None:
        self._artifacts = artifacts
        self._refusals = refusals
        self._checkers = FairLimiter(CHECKERS, shared=True)
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        principal: Principal = scope[PRINCIPAL_SCOPE_KEY]
        if self._under_way[principal.id] >= MAX_DOWNLOADS:
            self._refusals.note("busy.downloads", principal.id)
            await PlainTextResponse("You have too many downloads at a time.\n", 429)(scope, receive, send)
            return
        self._under_way[principal.id] += 1
        try:
            await self._answer(Request(scope), principal, receive, send)
        finally:
            self._under_way -= Counter((principal.id,))

    async def _answer(self, request: Request, principal: Principal, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with self._artifacts.open(uri_of(request.path_params["identifier"]), principal) as reader:
                async with self._checkers.turn(principal.id):
                    await reader.check()
                part = _asked(request, reader.artifact)
                begun = True
                await send({"type": "http.response.start", **_head(reader.artifact, part)})
                if part is not None and request.method != "HEAD":
                    async for chunk in reader.part(part.start, len(part)):
                        for at in range(0, len(chunk), PIECE_BYTES):
                            piece = chunk[at : at + PIECE_BYTES]
                            with anyio.move_on_after(PIECE_SECONDS) as waiting:
                                await send({"type": "http.response.body", "body": piece, "more_body": True})
                            if waiting.cancelled_caught:
                                return  # which disconnects the client
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except RefusedError as refusal:
            self._refusals.note(refusal.rule, principal.id)
            await PlainTextResponse(f"{refusal}\n", 404)(request.scope, receive, send)
        except ArtifactStoreError:
            if not begun:
                words = "The artifact cannot be read; the operator finds the reason with `glovebox artifact`.\n"
                await PlainTextResponse(words, 503)(request.scope, receive, send)


def _asked(request: Request, artifact: Artifact) -> range | None:
    """Return the requested bytes; None if out of range. Several ranges count as none: RFC 9110, 14.2."""
    everything = range(artifact.bytes)
    wanted = request.headers.getlist("range")
    validator = request.headers.get("if-range", _tag(artifact))
    match = _RANGE.fullmatch(wanted[0]) if len(wanted) == 1 and request.method == "GET" else None
    if match is None or not any(match.groups()) or validator != _tag(artifact):
        return everything
    first, last = match.groups()
    if not first:
        found = everything[max(0, artifact.bytes - int(last)) :]
    elif last and int(last) < int(first):
        return everything  # no range at all
    else:
        found = everything[int(first) : int(last) + 1 if last else None]
    return found or None


def _head(artifact: Artifact, part: range | None) -> dict[str, Any]:
    """Return status and headers."""
    size = artifact.bytes
    status, length = (416, 0) if part is None else (200 if len(part) == size else 206, len(part))
    headers = {
        "content-length": str(length),
        "content-type": artifact.media_type + ("; charset=utf-8" if artifact.media_type.startswith("text/") else ""),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(artifact.name.rpartition('/')[2], safe='')}",
        # The bytes are untrusted: nothing is guessed, run, kept by a proxy or shown inside another page.
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "private, no-store",
        "accept-ranges": "bytes",
        "etag": _tag(artifact),
    }
    if part is None:
        headers["content-range"] = f"bytes */{size}"
    elif status == 206:  # noqa: PLR2004 - Partial Content
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    if artifact.risks:
        shown = list(artifact.risks)
        while len(json.dumps(shown)) > MAX_RISKS and len(shown) > 1:
            shown = [*shown[: len(shown) // 2], "…"]
        text = json.dumps(shown)
        headers["glovebox-risks"] = text if len(text) <= MAX_RISKS else json.dumps(["too many to list here"])
    raw = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
    return {"status": status, "headers": raw}


def _tag(artifact: Artifact) -> str:
    return f'"{artifact.sha256}"'
