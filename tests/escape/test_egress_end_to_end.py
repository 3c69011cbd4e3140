"""Real calls on a private internet: tool, broker, sandbox, wire, proxy and gate (E1 to E17, M17)."""

import gzip
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from tests.fixtures.brokered import DRIVERS, glovebox, profile
from tests.fixtures.internet import (
    METADATA,
    OTHER,
    PRIVATE,
    SITE,
    Cable,
    answering,
    internet,
    ok,
    read_head,
    redirect,
    site,
    wires,
)

from glovebox_audit.chain import Draft
from glovebox_audit.event import Event
from glovebox_audit.events import EgressDecided
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.load.loader import SHIPPED

__all__ = ["wires"]

NAME = "docs.example.org"
URL = f"https://{NAME}"
PAGE = b"<html><title>Manual</title><body><h1>Hello</h1><p>Some <b>text</b>.</p></body></html>"
HTML = ok(PAGE, "Content-Type: text/html")
ANY = '{ host = "*.example.org" }'
TUNNEL = f'{{ host = "{NAME}", methods = ["CONNECT"] }}'
PLAIN = f'{{ host = "{NAME}", schemes = ["http"], methods = ["GET", "POST"], paths = ["/open/*"] }}'

#: What most programs do: they know nothing of the proxy but its variables.
GET = """
import urllib.request
try:
    with urllib.request.urlopen({url!r}, timeout=10) as answer:
        print(answer.status, len(answer.read()), dict(answer.headers))
except Exception as problem:
    print(type(problem).__name__, problem)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_allowed_page_comes_back_as_untrusted_text(
    driver: str, wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M17: one look-up, one recorded connection, and the page is taken apart in the sandbox, never in the server."""
    readers = ("_glovebox_guest.web.page", "_glovebox_guest.web.readable", "_glovebox_guest.jobs.fetch")
    for module in readers:
        monkeypatch.delitem(sys.modules, module, raising=False)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", driver, ANY)) as box:
        net.zone[NAME] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(HTML, requests), name=NAME)
        called = await box.call("fetch_url", url=f"{URL}/manual?q=1")
    assert called.fields["final_url"] == f"{URL}/manual?q=1"
    assert (called.fields["status"], called.fields["redirects"], called.fields["truncated"]) == (200, [], None)
    assert called.fields["untrusted"] is True
    assert called.fields["text"] == "# Hello\n\nSome text."
    assert called.text.startswith(f"[untrusted content fetched from {URL}/manual?q=1, status 200]\n")
    assert called.fields["isolation"]["driver"] == driver
    assert net.lookups == [NAME]
    assert called.egress == [("allow", "network.allow[0]", SITE)]
    egress = ["egress.decided", "egress.answered"]
    assert called.kinds == ["call.decided", "sandbox.started", *egress, "call.finished", "receipt.signed"]
    assert [(status, type_) for status, type_, _, _ in called.answered] == [(200, "text/html")]
    assert called.usage["egress_connections"] == 1
    assert called.usage["egress_received_bytes"] > len(HTML)
    assert called.usage["egress_sent_bytes"] > len(requests[0])
    assert not [module for module in readers if module in sys.modules]


@pytest.mark.driver("bubblewrap")
async def test_redirects_are_reported_and_each_is_decided(wires: Cable, tmp_path: Path) -> None:
    """E8: a chain is told hop by hop; one that leads to a private address is refused, with the way that led there."""
    pages = {
        "/start": redirect("https://b.example.org/end"),
        "/inside": redirect("https://inside.example.org/"),
        "/lower": redirect(f"http://{NAME}/end"),
    }
    text = profile("fetch_url", "bubblewrap", ANY, max_redirects=3, max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {NAME: [[SITE]], "b.example.org": [[OTHER]], "inside.example.org": [[PRIVATE]]}
        await net.serve(SITE, 443, site(pages), name=NAME)
        await net.serve(OTHER, 443, answering(HTML), name="b.example.org")
        await net.serve(PRIVATE, 443, answering(HTML), name="inside.example.org")
        chain = await box.call("fetch_url", url=f"{URL}/start")
        inside = await box.call("fetch_url", url=f"{URL}/inside")
        lower = await box.call("fetch_url", url=f"{URL}/lower")
    assert chain.fields["final_url"] == "https://b.example.org/end"
    assert chain.fields["redirects"] == [{"status": 302, "url": f"{URL}/start"}]
    assert f"[redirected by {URL}/start, status 302]" in chain.text
    assert chain.egress == [("allow", "network.allow[0]", SITE), ("allow", "network.allow[0]", OTHER)]
    assert [status for status, _, _, _ in chain.answered] == [302, 200]
    assert inside.fields["error"]["kind"] == "egress.address"
    assert "private" in inside.fields["error"]["message"]
    assert inside.fields["redirects"] == [{"status": 302, "url": f"{URL}/inside"}]
    assert inside.fields["untrusted"] is True
    assert inside.result.failed
    assert [rule for _, rule, _ in inside.egress] == ["network.allow[0]", "egress.address"]
    assert lower.fields["error"]["kind"] == "egress.redirect"
    assert f"{PRIVATE}:443" not in net.connections


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize(
    ("url", "method"),
    [
        ("https://other.example.net/", "GET"),
        (f"{URL}/secret", "GET"),
        (f"{URL}/manual", "HEAD"),
        (f"http://{NAME}/manual", "GET"),
        (f"http://{METADATA}/latest/meta-data/", "GET"),
        (f"https://{NAME}@evil.example.net/manual", "GET"),
    ],
)
async def test_what_no_rule_names_starts_nothing(url: str, method: str, wires: Cable, tmp_path: Path) -> None:
    """E4, E7, E11, E17: host, path, method and scheme; refused with no sandbox, no look-up, no connection."""
    rule = f'{{ host = "{NAME}", methods = ["GET"], paths = ["/manual"] }}'
    async with internet(wires) as net, glovebox(net, tmp_path, profile("fetch_url", "bubblewrap", rule)) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        refused = await box.call("fetch_url", url=url, method=method)
        assert refused.fields["refused"]["rule"] == "network.allow"
        assert refused.fields["refused"]["reason"]
        assert refused.kinds == ["call.decided"]
        assert (net.lookups, net.connections) == ([], [])
        control = await box.call("fetch_url", url=f"{URL}/manual")
        assert control.fields["status"] == 200


@pytest.mark.driver("bubblewrap")
async def test_a_page_that_is_too_much_comes_in_part(wires: Cable, tmp_path: Path) -> None:
    """E16: too long, a compression bomb, never ending: what came is returned and marked, and the call ends in time."""
    pages = {
        "/long": ok(b"x" * 99 + b"\n" * 70_000, "Content-Type: text/plain"),
        "/bomb": ok(gzip.compress(b" " * 64 * 2**20), "Content-Type: text/plain", "Content-Encoding: gzip"),
        "/slow": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 50\r\n\r\nthe beginning",
        "/mute": b"",
        "/whole": ok(b"all", "Content-Type: text/plain"),
    }
    text = profile("fetch_url", "bubblewrap", ANY, wall=2, max_bytes="64 KiB")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, site(pages), name=NAME)
        found = {path: await box.call("fetch_url", url=URL + path) for path in pages}
    assert "The body was cut at 65536 bytes." in found["/long"].fields["truncated"]
    assert found["/long"].fields["text"].startswith("xxx")
    assert "The body was cut at 65536 bytes." in found["/bomb"].fields["truncated"]
    assert found["/slow"].fields["text"] == "the beginning"
    assert "time was up" in found["/slow"].fields["truncated"]
    assert found["/mute"].fields["error"]["kind"] == "egress.failed"
    assert found["/mute"].fields["elapsed_ms"] < 10_000
    assert found["/whole"].fields["truncated"] is None


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_program_reaches_what_a_tunnel_rule_names(driver: str, wires: Cable, tmp_path: Path) -> None:
    """E1, E9: urllib with nothing but the environment, its certificate verified inside; all else says why not."""
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", driver, TUNNEL)) as box:
        net.zone |= {NAME: [[SITE]], "other.example.org": [[OTHER]]}
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        await net.serve(OTHER, 443, answering(HTML), name="other.example.org")
        allowed = await box.call("run_python", code=GET.format(url=f"{URL}/manual"))
        assert allowed.stdout.startswith(f"200 {len(PAGE)} ")
        assert allowed.egress == [("allow", "network.allow[0]", SITE)]
        assert allowed.usage["egress_connections"] == 1
        assert allowed.usage["egress_received_bytes"] > len(PAGE)
        other = await box.call("run_python", code=GET.format(url="https://other.example.org/"))
        assert (
            "Tunnel connection failed: 403 Glovebox: No rule of this profile names 'other.example.org'." in other.stdout
        )
        assert f"Allowed hosts: {NAME};" in other.stdout
        assert "(egress.host)" in other.stdout
        assert other.egress == [("deny", "egress.host", None)]
        port = await box.call("run_python", code=GET.format(url=f"{URL}:8443/"))
        assert "(egress.port)" in port.stdout
        assert net.lookups == [NAME]
        assert net.connections == [f"{SITE}:443"]


@pytest.mark.driver("bubblewrap")
async def test_a_peer_without_the_right_certificate_is_not_believed(wires: Cable, tmp_path: Path) -> None:
    """The tunnel cannot look inside, so the program verifies; the trust store it has is the host's."""
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", "bubblewrap", TUNNEL)) as box:
        net.zone[NAME] = [[SITE], [OTHER]]
        await net.serve(SITE, 443, answering(HTML), name="else.example.org")
        await net.serve(OTHER, 443, answering(HTML), name=NAME)
        called = await box.call("run_python", code=GET.format(url=URL))
        control = await box.call("run_python", code=GET.format(url=URL))
    assert "CERTIFICATE_VERIFY_FAILED" in called.stdout
    assert "Hostname mismatch" in called.stdout
    assert control.stdout.startswith(f"200 {len(PAGE)} ")


#: Everything a program might try that does not go through the proxy: each line is the name of what came.
AROUND = """
import socket, urllib.request
def attempt(what, action):
    try:
        action()
        print(what, "WENT THROUGH")
    except OSError as problem:
        print(what, problem.__class__.__name__, problem.errno)
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.sendto(b"x", ("{site}", 443))
attempt("direct", lambda: socket.create_connection(("{site}", 443), timeout=5))
attempt("direct6", lambda: socket.create_connection(("2a00:1450:4001::1", 443), timeout=5))
attempt("udp", udp)
attempt("dns", lambda: socket.getaddrinfo("{name}", 443))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("no proxy", lambda: urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open("{url}", timeout=5))
attempt("proxy", lambda: urllib.request.urlopen("{url}", timeout=10))
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_around_the_proxy_there_is_nothing(driver: str, wires: Cable, tmp_path: Path) -> None:
    """E4, E5, E13: no route, no resolver, no raw sockets; through the proxy the same page comes (control)."""
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", driver, TUNNEL)) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        called = await box.call("run_python", code=AROUND.format(site=SITE, name=NAME, url=URL))
    found = dict(line.rsplit(" ", 2)[0::2] for line in called.stdout.splitlines() if "THROUGH" not in line)
    # ENETUNREACH; gVisor's network says EHOSTUNREACH.
    assert found["direct"] == found["direct6"] == found["udp"] in ("101", "113"), called.stdout
    assert found["dns"] in ("-2", "-3"), called.stdout  # no such name, no resolver
    assert found["raw"] == "1", called.stdout  # EPERM
    assert found["no proxy"] in ("None", "-3"), called.stdout
    assert "proxy WENT THROUGH" in called.stdout
    assert called.stdout.count("THROUGH") == 1
    assert net.connections == [f"{SITE}:443"]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_shipped_profile_lets_programs_reach_nothing(driver: str, wires: Cable, tmp_path: Path) -> None:
    """No proxy listens, none is announced; under an operator's profile the same program gets the page (control)."""
    code = GET.format(url=URL) + "\nimport os, socket\nprint(sorted(n for n in os.environ if 'proxy' in n.lower()))\n"
    code += "print(socket.socket().connect_ex(('127.0.0.1', 3128)))"
    shipped = (SHIPPED / "run_python.toml").read_text().replace('["bubblewrap", "docker"]', f'["{driver}"]')
    async with internet(wires) as net, glovebox(net, tmp_path, shipped) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        called = await box.call("run_python", code=code)
    lines = called.stdout.splitlines()
    assert lines[0].startswith("URLError")
    assert lines[1:] == ["[]", "111"]  # ECONNREFUSED
    assert (net.lookups, called.egress) == ([], [])
    assert called.fields["isolation"]["driver"] == driver
    own = tmp_path / "own"
    own.mkdir()
    async with internet(wires) as net, glovebox(net, own, profile("run_python", driver, TUNNEL)) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        control = await box.call("run_python", code=code)
    assert control.stdout.startswith(f"200 {len(PAGE)} ")
    assert control.stdout.endswith("\n0\n")  # connected


#: A tunnel to the allowed host in which another host's name is said.
MISMATCH = """
import socket, ssl
plain = socket.create_connection(("127.0.0.1", 3128))
plain.sendall(b"CONNECT docs.example.org:443 HTTP/1.1\\r\\n\\r\\n")
print(plain.recv(4096).split(b"\\r\\n")[0])
try:
    ssl.create_default_context().wrap_socket(plain, server_hostname={name!r})
    print("WENT THROUGH")
except OSError as problem:
    print(type(problem).__name__)
"""


@pytest.mark.driver("bubblewrap")
async def test_another_name_inside_the_tunnel_is_cut_off(wires: Cable, tmp_path: Path) -> None:
    """E10: nothing is resolved or dialled, and the reason is on standard error; the right name passes (control)."""
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", "bubblewrap", TUNNEL)) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        wrong = await box.call("run_python", code=MISMATCH.format(name="other.example.org"))
        assert "THROUGH" not in wrong.stdout
        assert wrong.stderr == (
            f"[glovebox] The tunnel to {NAME}:443 was cut off: egress.sni: The tunnel to {NAME} was used to ask for "
            "'other.example.org'. Open a tunnel to the host that TLS is spoken with.\n"
        )
        assert wrong.egress == [("deny", "egress.sni", None)]
        assert (net.lookups, net.connections) == ([], [])
        right = await box.call("run_python", code=MISMATCH.format(name=NAME))
        assert right.stdout == "b'HTTP/1.1 200 Connection established'\nWENT THROUGH\n"
        net.zone[NAME] = [[PRIVATE]]
        private = await box.call("run_python", code=MISMATCH.format(name=NAME))
        assert "egress.address" in private.stderr
        assert len(net.connections) == 1


@pytest.mark.driver("bubblewrap")
async def test_plain_requests_are_held_to_method_and_path(wires: Cable, tmp_path: Path) -> None:
    """E10, E11: the host makes the request from its parts, without credentials or a smuggled Host, and says so."""
    requests: list[bytes] = []
    pages = {"/open/a": ok(b"page", "Set-Cookie: a=b"), "/open/cut": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut"}
    pages["/open/b"] = redirect("/open/a")
    credentials = GET.format(url="").replace("''", "request")
    code = f"""
import urllib.request
headers = {{"Authorization": "Basic eA==", "Host": "evil.example"}}
request = urllib.request.Request("http://{NAME}/open/a", headers=headers)
{credentials}"""
    text = profile("run_python", "bubblewrap", PLAIN, max_redirects=1, max_connections=2)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 80, site(pages, requests))
        passed = await box.call("run_python", code=code)
        assert passed.stdout.startswith("200 4 "), passed
        assert "'glovebox-left-out': 'authorization'" in passed.stdout
        assert "Set-Cookie" not in passed.stdout
        assert b"Host: docs.example.org\r\n" in requests[0]
        assert b"authorization" not in requests[0].lower()
        moved = await box.call("run_python", code=GET.format(url=f"http://{NAME}/open/b"))
        assert f"'content-location': 'http://{NAME}/open/a'" in moved.stdout, moved
        cut = await box.call("run_python", code=GET.format(url=f"http://{NAME}/open/cut"))
        assert cut.stdout.startswith("IncompleteRead"), cut
        assert "[glovebox] The response to GET" in cut.stderr
        asked = len(requests)
        for path in ("/secret", "/open/../secret", "/open/%2e%2e/secret"):
            refused = await box.call("run_python", code=GET.format(url=f"http://{NAME}{path}"))
            assert "(egress.path)" in refused.stdout, refused
        assert len(requests) == asked


#: What a hostile program says to the proxy, and the first line of each answer.
HOSTILE = """
import socket
def say(data):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as proxy:
        try:
            proxy.sendall(data)
            proxy.shutdown(socket.SHUT_WR) if data is None else None
            print(proxy.recv(65536).split(b"\\r\\n")[0].decode()[:60])
        except OSError as problem:
            print(type(problem).__name__)
say(b"GET / HTTP/1.1\\r\\n\\r\\n")
say(b"\\x16\\x03\\x01" + bytes(30000))
say(b"CONNECT\\r\\n\\r\\n")
say(b"POST http://docs.example.org/open/ HTTP/1.1\\r\\nTransfer-Encoding: chunked\\r\\nContent-Length: 0\\r\\n\\r\\n")
say(b"POST http://docs.example.org/open/x HTTP/1.1\\r\\nContent-Length: 1\\r\\nContent-Length: 2\\r\\n\\r\\nab")
say(b"GET http://docs.example.org/open/a HTTP/1.1\\r\\nAccept:\\r\\n */*\\r\\n\\r\\n")
say(b"GET ftp://docs.example.org/ HTTP/1.1\\r\\n\\r\\n")
say(b"CONNECT docs.example.org\\0.evil.example:443 HTTP/1.1\\r\\n\\r\\n")
say(b"CONNECT 169.254.169.254:443 HTTP/1.1\\r\\n\\r\\n")
say(b"POST http://docs.example.org/open/x HTTP/1.1\\r\\nContent-Length: 3000000\\r\\n\\r\\n" + bytes(3000000))
crowd = [socket.create_connection(("127.0.0.1", 3128), timeout=10) for _ in range(40)]
for one in crowd:
    one.sendall(b"CONNECT docs.example.org:443 HTTP/1.1\\r\\n")
for one in crowd:
    one.close()
say(b"GET http://docs.example.org/open/a HTTP/1.1\\r\\nAccept: */*\\r\\n\\r\\n")
say(b"POST http://docs.example.org/open/x HTTP/1.1\\r\\nContent-Length: 2\\r\\nContent-Length: 2\\r\\n\\r\\nab")
say(b"POST http://docs.example.org/open/x HTTP/1.1\\r\\nContent-Length: 300000\\r\\n\\r\\n" + bytes(300000))
import urllib.request
print(urllib.request.urlopen("http://docs.example.org/open/a", timeout=10).status)
"""


@pytest.mark.driver("bubblewrap")
async def test_a_program_cannot_hurt_the_proxy(wires: Cable, tmp_path: Path) -> None:
    """E1, E16: nonsense gets an answer, a crowd waits its turn; the same without the flaw works after all of it."""
    text = profile("run_python", "bubblewrap", PLAIN, max_connections=4)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 80, answering(ok(b"page")))
        called = await box.call("run_python", code=HOSTILE)
    lines = called.stdout.splitlines()
    assert [line.split(" ")[1] for line in lines[:6]] == ["400"] * 6, called
    assert [line.split(" ")[1] for line in lines[6:10]] == ["403"] * 4, called
    assert [line.split(" ")[1] for line in lines[10:13]] == ["200"] * 3, called
    assert lines[13:] == ["200"], called
    assert net.connections == [f"{SITE}:80"] * 4


#: Two megabytes each way through a tunnel, and as many printed, all at once.
BUSY = """
import socket, ssl, threading
plain = socket.create_connection(("127.0.0.1", 3128))
plain.sendall(b"CONNECT docs.example.org:443 HTTP/1.1\\r\\n\\r\\n")
plain.recv(4096)
secure = ssl.create_default_context().wrap_socket(plain, server_hostname="docs.example.org")
def send():
    for _ in range(64):
        secure.sendall(bytes(65536))
def talk():
    for _ in range(4096):
        print("x" * 1023)
threads = [threading.Thread(target=send), threading.Thread(target=talk)]
for thread in threads:
    thread.start()
received = 0
while received < 64 * 65536:
    received += len(secure.recv(65536))
for thread in threads:
    thread.join()
print("all", received)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_traffic_both_ways_never_stands_still(driver: str, wires: Cable, tmp_path: Path) -> None:
    """Both ends of the wire are full at the same time: neither may wait for the other without reading."""

    async def echo(stream: anyio.abc.ByteStream) -> None:
        while True:
            await stream.send(await stream.receive())

    text = profile("run_python", driver, TUNNEL, max_bytes="64 MiB")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, echo, name=NAME)
        called = await box.call("run_python", code=BUSY)
    assert called.fields["ended"] == "exited", called
    assert called.stdout.endswith(f"all {64 * 65536}\n")
    assert called.usage["egress_sent_bytes"] > 64 * 65536


@pytest.mark.driver("bubblewrap")
async def test_a_connection_without_its_record_is_not_made(
    wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails as the operator's matter, and no server was connected (control: it was before)."""
    append = AuditLog.append_all
    broken = False

    async def failing(log: AuditLog, events: Sequence[Event | Draft], then: Any = None) -> object:
        if broken and any(event.kind == EgressDecided.kind for event in events):
            raise AuditError("record egress.decided", "the disk is full", "Make room.")
        return await append(log, events, then)

    monkeypatch.setattr(AuditLog, "append_all", failing)
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", "bubblewrap", TUNNEL)) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(HTML), name=NAME)
        assert (await box.call("run_python", code=GET.format(url=URL))).stdout.startswith("200")
        broken = True
        with pytest.raises(AuditError, match="the disk is full"):
            await box.call("run_python", code=GET.format(url=URL))
    assert len(net.connections) == 1


@pytest.mark.driver("bubblewrap")
async def test_when_the_broker_is_gone_so_is_the_network(wires: Cable, tmp_path: Path) -> None:
    """E5: the server is killed while a program is downloading; the connection ends with it."""
    for name in ("profiles", "workspace"):
        (tmp_path / name).mkdir()
    (tmp_path / "profiles" / "run_python.toml").write_text(
        profile("run_python", "bubblewrap", f'{{ host = "{SITE}", schemes = ["http"] }}', max_bytes="64 MiB")
    )
    reached, left = anyio.Event(), anyio.Event()

    async def endless(stream: anyio.abc.ByteStream) -> None:
        await read_head(stream)
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
        reached.set()
        try:
            while True:
                await stream.send(b"x")
                await anyio.lowlevel.checkpoint()
        finally:
            left.set()

    code = f"import urllib.request\nurllib.request.urlopen('http://{SITE}/').read()"
    command = [sys.executable, "-m", "glovebox_server", "call", "run_python", "--args", json.dumps({"code": code})]
    settings = {"profiles": "PROFILES_DIR", "state": "STATE_DIR", "workspace": "WORKSPACE"}
    environment = {**os.environ, **{f"GLOVEBOX_{name}": str(tmp_path / path) for path, name in settings.items()}}
    async with internet(wires) as net:
        await net.serve(SITE, 80, endless)
        async with await anyio.open_process(command, env=environment, stdout=None, stderr=None) as broker:
            with anyio.fail_after(30):
                await reached.wait()
                assert not left.is_set()
                os.kill(broker.pid, signal.SIGKILL)
                await left.wait()
            await broker.wait()
