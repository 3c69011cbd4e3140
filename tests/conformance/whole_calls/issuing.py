"""An authorization server of the proof's own, on loopback: what it says of itself, its key, and the tokens it signs."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio
import jwt
from anyio.abc import SocketAttribute, SocketStream
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from glovebox_server.transport.oauth.authority import Scopes, TokenAuthority
from glovebox_server.transport.oauth.issuer import OAuth

_KEY: Final = "proof"
_ALGORITHM: Final = "ES256"
_SECONDS: Final = 300
_MOST: Final = 64 * 1024


@asynccontextmanager
async def opened(host: str) -> AsyncIterator[tuple[TokenAuthority, Callable[[str, str], str]]]:
    """Run one for the length of the block; what checks its tokens for a server, and what signs them.

    Args:
        host: of the server that they are for.
    """
    key, another = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610 - not of Django
    public = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": _KEY, "alg": _ALGORITHM, "use": "sig"}
    told = {"/jwks": {"keys": [public]}}
    about = {"issuer": url, "jwks_uri": f"{url}/jwks"}

    async def answer(stream: SocketStream) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with stream:
                head = b""
                while b"\r\n\r\n" not in head and len(head) < _MOST:
                    head += await stream.receive()
                body = json.dumps(told.get(head.split(b" ")[1].decode(), about)).encode()
                await stream.send(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )

    def token(kind: str, subject: str) -> str:
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": url, "sub": subject, "iat": now - 2 * _SECONDS, "client_id": "proof", "jti": f"{subject}-{kind}",
            "aud": f"https://{'another.proof' if kind == 'issued for another' else host}/mcp",
            "exp": now + (-_SECONDS if kind == "issued long ago" else _SECONDS),
        }  # fmt: skip
        headers = {"kid": _KEY, "typ": "at+jwt"}
        if kind == "unsigned":
            return jwt.encode(claims, "", algorithm="none", headers=headers) + "AAAA"
        signs = another if kind == "signed by another" else key
        return jwt.encode(claims, signs, algorithm=_ALGORITHM, headers=headers)

    authority = TokenAuthority(OAuth(issuer=url), [host], Scopes())
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        await authority.issuer.fetch()
        tasks.start_soon(authority.issuer.follow)
        tasks.start_soon(authority.checks.follow)
        yield authority, token
        tasks.cancel_scope.cancel()
