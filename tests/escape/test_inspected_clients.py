"""Ordinary clients of HTTP under inspected TLS, unchanged, with nothing but the variables a sandbox has: the matrix."""

from pathlib import Path

import anyio.abc
import pytest
from tests.escape import test_keys_in_calls as keys
from tests.fixtures.brokered import DRIVERS, glovebox, profile
from tests.fixtures.environments import clients, clients_image, installed
from tests.fixtures.internet import SITE, Cable, internet, ok, read_head, wires

from glovebox_sandboxes.drivers.docker.image import build

__all__ = ["clients", "clients_image", "installed", "wires"]

NAME = "docs.example.org"
PAGES = f'{{ host = "{NAME}", methods = ["GET", "POST"], paths = ["/open/*"] }}'
#: Each gets a page, sends a body in two pieces, reads a stream of events, and asks for what no rule allows.
CLIENTS = {
    "urllib": """
import urllib.error, urllib.request
print(urllib.request.urlopen(f"{url}/open/page").read())
print(urllib.request.urlopen(urllib.request.Request(f"{url}/open/echo", data=iter(pieces))).read())
with urllib.request.urlopen(f"{url}/open/events") as answer:
    print([line for line in answer])
try:
    urllib.request.urlopen(f"{url}/secret")
except urllib.error.HTTPError as refused:
    print(refused.code, refused.read())
""",
    "http.client": """
import http.client, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
connection = http.client.HTTPSConnection(proxy.hostname, proxy.port)
connection.set_tunnel(urllib.parse.urlsplit(url).hostname)
def ask(*asked, **given):
    connection.request(*asked, **given)
    return connection.getresponse()
print(ask("GET", "/open/page").read())
print(ask("POST", "/open/echo", body=iter(pieces), encode_chunked=True).read())
print([line for line in ask("GET", "/open/events")])
refused = ask("GET", "/secret")
print(refused.status, refused.read())
""",
    "asyncio": """
import asyncio, os, ssl, urllib.parse
proxy, host = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"]), urllib.parse.urlsplit(url).hostname
async def ask(method, path, body=()):
    reader, writer = await asyncio.open_connection(proxy.hostname, proxy.port)
    writer.write(f"CONNECT {host}:443 HTTP/1.1\\r\\n\\r\\n".encode())
    await reader.readuntil(b"\\r\\n\\r\\n")
    await writer.start_tls(ssl.create_default_context(), server_hostname=host)
    length = f"Content-Length: {sum(map(len, body))}\\r\\n" if body else ""
    writer.write(f"{method} {path} HTTP/1.1\\r\\n{length}Connection: close\\r\\n\\r\\n".encode())
    for piece in body:
        writer.write(piece)
        await writer.drain()
    head, _, answer = (await reader.read()).partition(b"\\r\\n\\r\\n")
    writer.close()
    if b"chunked" not in head:
        return int(head.split()[1]), answer
    return int(head.split()[1]), b"".join(answer.split(b"\\r\\n")[1::2])
async def main():
    print((await ask("GET", "/open/page"))[1])
    print((await ask("POST", "/open/echo", pieces))[1])
    print((await ask("GET", "/open/events"))[1].splitlines(keepends=True))
    print(*await ask("GET", "/secret"))
asyncio.run(main())
""",
    "requests": """
import requests
with requests.Session() as session:
    print(session.get(f"{url}/open/page").content)
    print(session.post(f"{url}/open/echo", data=iter(pieces)).content)
    with session.get(f"{url}/open/events", stream=True) as answer:
        print([line + b"\\n" for line in answer.iter_lines()])
    refused = session.get(f"{url}/secret")
    print(refused.status_code, refused.content)
""",
    "urllib3": """
import os, urllib3
pool = urllib3.ProxyManager(os.environ["HTTPS_PROXY"])
print(pool.request("GET", f"{url}/open/page").data)
print(pool.request("POST", f"{url}/open/echo", body=iter(pieces), chunked=True).data)
print(b"".join(pool.request("GET", f"{url}/open/events", preload_content=False).stream()).splitlines(keepends=True))
refused = pool.request("GET", f"{url}/secret")
print(refused.status, refused.data)
""",
    "httpx": """
import httpx
with httpx.Client() as client:
    print(client.get(f"{url}/open/page").content)
    print(client.post(f"{url}/open/echo", content=iter(pieces)).content)
    with client.stream("GET", f"{url}/open/events") as answer:
        print([line.encode() + b"\\n" for line in answer.iter_lines()])
    refused = client.get(f"{url}/secret")
    print(refused.status_code, refused.content)
""",
    "httpx, asynchronous": """
import asyncio, httpx
async def both():
    for piece in pieces:
        yield piece
async def main():
    async with httpx.AsyncClient() as client:
        print((await client.get(f"{url}/open/page")).content)
        print((await client.post(f"{url}/open/echo", content=both())).content)
        async with client.stream("GET", f"{url}/open/events") as answer:
            print([line.encode() + b"\\n" async for line in answer.aiter_lines()])
        refused = await client.get(f"{url}/secret")
        print(refused.status_code, refused.content)
asyncio.run(main())
""",
    "aiohttp": """
import aiohttp, asyncio
async def both():
    for piece in pieces:
        yield piece
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get(f"{url}/open/page") as answer:
            print(await answer.read())
        async with session.post(f"{url}/open/echo", data=both()) as answer:
            print(await answer.read())
        async with session.get(f"{url}/open/events") as answer:
            print([line async for line in answer.content])
        async with session.get(f"{url}/secret") as refused:
            print(refused.status, await refused.read())
asyncio.run(main())
""",
}


async def serve(stream: anyio.abc.ByteStream) -> None:
    """A page, an echo, a stream of events without a length."""
    head, _, body = (await read_head(stream)).partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
    while len(body) < length:
        body += await stream.receive()
    if b" /open/events " in head:
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await stream.send(b"data: 2\n\n")
        return
    await stream.send(ok(b"%d bytes" % len(body) if b" /open/echo " in head else b"page"))


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, clients: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each driver, with the packages: before ``wires``, from where no index is reached."""
    name: str = request.param
    if name == "docker":
        image = request.getfixturevalue("clients_image")
        monkeypatch.setattr(build, "tag", lambda *_: image)
    return name


async def test_ordinary_clients_work_unchanged(driver: str, clients: Path, wires: Cable, tmp_path: Path) -> None:
    """Pages, bodies in pieces and streams pass; a path of no rule is refused with why. Records say which it was."""
    text = profile("run_python", driver, PAGES, wall=60, tls="inspect", max_connections=64)
    code = f"""
for code in {[*CLIENTS.values()]!r}:
    exec(code, {{"url": "https://{NAME}", "pieces": [b"x" * 70000, b"y"]}})
    print(flush=True)
"""
    async with internet(wires) as net, glovebox(net, tmp_path, text, data=clients) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, serve, name=NAME)
        called = await box.call("run_python", code=code)
    said = called.stdout.split("\n\n")
    for client, lines in zip(CLIENTS, said, strict=False):
        passed, refused = lines.rsplit("\n", 1)
        assert passed == "b'page'\nb'70001 bytes'\n" + r"[b'data: 1\n', b'\n', b'data: 2\n', b'\n']", (client, called)
        assert refused.startswith("403 b\"Glovebox: The path '/secret' is not allowed"), (client, called)
    assert len(said) == len(CLIENTS) + 1, called
    stream = (200, "text/event-stream", 18, True)
    assert called.answered == [(200, None, 4, True), (200, None, 11, True), stream] * len(CLIENTS)
    rules = [*["network.allow[0]"] * 3, "egress.path"] * len(CLIENTS)
    assert [rule for _, rule, _ in called.egress] == rules


@pytest.mark.parametrize("driver", [DRIVERS[0], DRIVERS[2]], indirect=True)
async def test_they_use_an_api_with_a_key_they_never_have(
    driver: str, clients: Path, wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their code unchanged, their TLS inspected."""
    monkeypatch.setenv("TRACKER_SOURCE", keys.KEY)
    await keys.uses_a_key(wires, tmp_path, driver, keys.CLIENTS["installed"], data=clients)
