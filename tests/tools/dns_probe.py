"""Runs inside namespaces of its own: a DNS server on loopback, and the real resolver asking it. Prints JSON.

Usage: ``dns_probe.py NAME…`` with ``/etc/resolv.conf`` pointing at 127.0.0.1. For each name, the addresses or the
error; every question that reached the server; and, as the control, what a plain look-up of each name finds.
"""

import json
import socket
import sys
import threading

import anyio

from glovebox_server.egress.dial import resolve, system_resolver
from glovebox_server.egress.events import PeerError

ZONE = {"files.example.org": "93.184.1.1", "files.example.net.corp.example": "10.0.0.1"}
HEADER = 12


def answer(query: bytes, questions: list[str]) -> bytes:
    """Return the reply to one question and note it."""
    labels, at = [], HEADER
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    name, kind, question = ".".join(labels), query[at + 2], query[HEADER : at + 5]
    questions.append(name)
    known = ZONE.get(name.lower())
    record = b""
    if known is not None and kind == 1:
        record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(known)
    flags = b"\x81\x80" if known else b"\x81\x83"
    counts = b"\0\1" + (b"\0\1" if record else b"\0\0") + b"\0\0\0\0"
    return query[:2] + flags + counts + question + record


def serve(server: socket.socket, questions: list[str]) -> None:
    """Answer until the process ends."""
    while True:
        query, client = server.recvfrom(512)
        server.sendto(answer(query, questions), client)


async def look_up(name: str) -> list[str] | str:
    """Resolve one name the way the gate does."""
    try:
        return [str(address) for address in await resolve(name, system_resolver, 5)]
    except PeerError as failed:
        return str(failed)


def plainly(name: str) -> list[str]:
    """Resolve one name the way most programs do."""
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})


def main() -> None:
    """Serve, ask, report."""
    questions: list[str] = []
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=serve, args=(server, questions), daemon=True).start()
    found = {name: anyio.run(look_up, name) for name in sys.argv[1:]}
    asked = sorted(set(questions))
    plain = {name: plainly(name) for name in sys.argv[1:]}
    json.dump({"found": found, "questions": asked, "plain": plain}, sys.stdout)


main()
