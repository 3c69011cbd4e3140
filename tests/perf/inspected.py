"""``python -m tests.perf.inspected``: what inspected TLS costs a program, held to its bounds; exit code 1 beyond them.

Needs root and iproute2: servers are in namespaces of their own. What is compared is measured in turns, in one call.
"""

import json
import sys
import tempfile
from pathlib import Path

import anyio
import anyio.abc
from rich.console import Console
from tests.fixtures.brokered import glovebox, profile
from tests.fixtures.internet import SITE, cable, internet, ok, read_head

MOST_MS, LEAST_SHARE = 5.0, 0.5
"""Of a host that TLS was not spoken with before, the median; of the bytes per second of plain HTTP."""
NAMES, PAGE = 100, 16 << 20
RULE = '{ host = "*.docs.example.org", schemes = ["https", "http"] }'
PROGRAM = f"""
import json, socket, ssl, statistics, time, urllib.request
context = ssl.create_default_context()
def handshake(name):
    began = time.perf_counter()
    plain = socket.create_connection(("127.0.0.1", 3128))
    plain.sendall(f"CONNECT {{name}}:443 HTTP/1.1\\r\\n\\r\\n".encode())
    plain.recv(4096)
    context.wrap_socket(plain, server_hostname=name).close()
    return (time.perf_counter() - began) * 1000
def fetch(scheme):
    began = time.perf_counter()
    with urllib.request.urlopen(f"{{scheme}}://a.docs.example.org/") as page:
        assert sum(map(len, iter(lambda: page.read(65536), b""))) == {PAGE}
    return {PAGE} / (time.perf_counter() - began) / 1e6
handshake("first.docs.example.org")
names = [f"n{{number}}.docs.example.org" for number in range({NAMES})]
new = [handshake(name) for name in names]
known = [handshake(name) for name in names]
fetch("http"), fetch("https")
rates = [(fetch("http"), fetch("https")) for _ in range(7)]
print(json.dumps({{
    "new": statistics.median(new), "known": statistics.median(known),
    "plain": statistics.median(plain for plain, _ in rates), "inspected": statistics.median(tls for _, tls in rates),
    "share": statistics.median(tls / plain for plain, tls in rates),
}}))
"""


async def serve(stream: anyio.abc.ByteStream) -> None:
    """Give a large page."""
    await read_head(stream)
    await stream.send(ok(b"").replace(b"Length: 0", b"Length: %d" % PAGE))
    for _ in range(PAGE // 65536):
        await stream.send(bytes(65536))


async def measure() -> bool:
    """Print what was measured, and whether it is within the bounds."""
    text = profile("run_python", "bubblewrap", RULE, wall=60, tls="inspect", max_connections=64, max_bytes="32 MiB")
    with cable() as wires, tempfile.TemporaryDirectory() as place:
        async with internet(wires) as net, glovebox(net, Path(place), text) as box:
            net.zone["a.docs.example.org"] = [[SITE]]
            await net.serve(SITE, 80, serve)
            await net.serve(SITE, 443, serve, name="a.docs.example.org")
            called = await box.call("run_python", code=PROGRAM)
    if not called.stdout:
        raise SystemExit(str(called))
    found = json.loads(called.stdout)
    held: bool = found["new"] <= MOST_MS and found["share"] >= LEAST_SHARE
    console = Console(highlight=False)
    console.print(
        f"new host, p50 of {NAMES}: {found['new']:.2f} ms (at most {MOST_MS:g}); again: {found['known']:.2f} ms"
    )
    console.print(f"http:// {found['plain']:.0f} MB/s, inspected {found['inspected']:.0f} MB/s:", end=" ")
    console.print(f"{found['share']:.2f} times as much (at least {LEAST_SHARE:g})")
    console.print("held" if held else "NOT HELD")
    return held


if __name__ == "__main__":
    sys.exit(not anyio.run(measure))
