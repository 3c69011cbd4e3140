"""Programs' own TLS that ends inside their sandbox: what ordinary clients reach, and what they do not."""

from pathlib import Path

import anyio
import anyio.abc
import pytest
from tests.fixtures.brokered import DRIVERS, glovebox, profile
from tests.fixtures.internet import OTHER, SITE, Cable, answering, internet, ok, read_head, redirect, site, wires

from glovebox_server.egress.events import EgressLimits

__all__ = ["wires"]

NAME, OTHER_NAME = "docs.example.org", "other.example.org"
URL = f"https://{NAME}"
PAGES = f'{{ host = "{NAME}", methods = ["GET", "POST"], paths = ["/open/*"] }}'
TUNNEL = f'{{ host = "{OTHER_NAME}", methods = ["CONNECT"] }}'

URLLIB = """
import urllib.error, urllib.request
def get(url, **given):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **given), timeout=10) as answer:
            print(answer.status, answer.read(), dict(answer.headers))
    except urllib.error.HTTPError as refused:
        print(refused.code, refused.reason)
    except Exception as problem:
        print(type(problem).__name__, problem)
"""


@pytest.mark.parametrize("driver", DRIVERS)
async def test_method_and_path_rules_hold_for_programs_own_tls(driver: str, wires: Cable, tmp_path: Path) -> None:
    """Urllib with nothing but the environment: the page comes; another path, method, host does not, each with why."""
    requests: list[bytes] = []
    code = (
        URLLIB
        + f"""
get("{URL}/open/a", headers={{"Authorization": "Basic eA==", "X-Own": "1"}})
get("{URL}/secret")
get("{URL}/open/a", method="DELETE")
get("https://{OTHER_NAME}/open/a")
get("{URL}:8443/open/a")
"""
    )
    text = profile("run_python", driver, PAGES, tls="inspect", max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(ok(b"page"), requests), name=NAME)
        called = await box.call("run_python", code=code)
    lines = called.stdout.splitlines()
    assert lines[0].startswith("200 b'page' "), called
    assert "'glovebox-left-out': 'authorization, x-own'" in lines[0]
    assert lines[1].startswith("403 Glovebox: The path"), called
    assert lines[1].endswith("(egress.path)")
    assert lines[2].endswith("(egress.method)")
    assert "(egress.host)" in lines[3]
    assert "(egress.port)" in lines[4]
    assert [rule for _, rule, _ in called.egress] == [
        "network.allow[0]", "egress.path", "egress.method", "egress.host", "egress.port"
    ]  # fmt: skip
    assert len(requests) == 1
    assert net.lookups == [NAME]


@pytest.mark.driver("bubblewrap")
async def test_without_it_the_same_program_reaches_nothing(wires: Cable, tmp_path: Path) -> None:
    """The control: the default refuses the tunnel, since what is inside could not be held to paths."""
    async with internet(wires) as net, glovebox(net, tmp_path, profile("run_python", "bubblewrap", PAGES)) as box:
        called = await box.call("run_python", code=f"{URLLIB}\nget('{URL}/open/a')")
        assert "(egress.tunnel)" in called.stdout
        assert (net.lookups, called.egress) == ([], [("deny", "egress.tunnel", None)])


@pytest.mark.driver("bubblewrap")
async def test_a_host_with_a_connect_rule_stays_a_tunnel(wires: Cable, tmp_path: Path) -> None:
    """There the program verifies the server's own certificate; beside it TLS is inspected."""
    code = f"""
import socket, ssl
for host in ("{NAME}", "{OTHER_NAME}"):
    plain = socket.create_connection(("127.0.0.1", 3128))
    plain.sendall(f"CONNECT {{host}}:443 HTTP/1.1\\r\\n\\r\\n".encode())
    plain.recv(4096)
    secure = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    print(dict(pair for (pair,) in secure.getpeercert()["issuer"]))
    secure.sendall(b"GET /open/a HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print(secure.recv(15))
"""
    text = profile("run_python", "bubblewrap", PAGES, TUNNEL, tls="inspect", max_connections=2)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {NAME: [[SITE]], OTHER_NAME: [[OTHER]]}
        await net.serve(SITE, 443, answering(ok(b"page")), name=NAME)
        await net.serve(OTHER, 443, answering(ok(b"tunnelled")), name=OTHER_NAME)
        called = await box.call("run_python", code=code)
    lines = called.stdout.splitlines()
    assert lines[0] == "{'commonName': 'Glovebox: this sandbox alone'}", called
    assert "trustme" in lines[2]
    assert lines[1] == lines[3] == "b'HTTP/1.1 200 OK'" or lines[1].startswith("b'HTTP/1.1 200 ")
    methods = [record.data["method"] for record in called.records if record.kind == "egress.decided"]
    assert methods == ["GET", "CONNECT"]


@pytest.mark.driver("bubblewrap")
async def test_what_is_no_https_is_refused_with_the_reason(wires: Cable, tmp_path: Path) -> None:
    """Bytes that are no TLS, TLS that is no HTTP, and a program that trusts nobody but its own authority."""
    code = f"""
import socket, ssl
def connected():
    plain = socket.create_connection(("127.0.0.1", 3128), timeout=10)
    plain.sendall(b"CONNECT {NAME}:443 HTTP/1.1\\r\\n\\r\\n")
    assert b" 200 " in plain.recv(4096)
    return plain
def end(stream):
    try:
        print(stream.recv(4096)[:60])
    except OSError as problem:
        print(type(problem).__name__)
foreign = connected()
foreign.sendall(b"SSH-2.0-OpenSSH_9.6\\r\\n")
end(foreign)
try:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connected(), server_hostname="{NAME}")
except ssl.SSLError as problem:
    print(problem.reason)
try:
    ssl.create_default_context().wrap_socket(connected(), server_hostname="{OTHER_NAME}")
except ssl.SSLError as problem:
    print(problem.reason)
other = ssl.create_default_context().wrap_socket(connected(), server_hostname="{NAME}")
other.sendall(b"EHLO me\\r\\n\\r\\n")
end(other)
"""
    text = profile("run_python", "bubblewrap", PAGES, tls="inspect")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        called = await box.call("run_python", code=code)
    lines = called.stdout.splitlines()
    assert lines[1:3] == ["CERTIFICATE_VERIFY_FAILED"] * 2, called
    assert lines[3].startswith("b'HTTP/1.1 400 Glovebox: The first line is not a request line")
    told = called.stderr.splitlines()
    assert told[0].startswith(f"[glovebox] The tunnel to {NAME}:443 was cut off: it is no TLS ("), called
    assert "needs a rule with CONNECT" in told[0]
    assert told[1].startswith(
        f"[glovebox] The tunnel to {NAME}:443 was cut off: the program ended it (TLSV1_ALERT_UNKNOWN"
    )
    assert told[2].startswith(f"[glovebox] The tunnel to {NAME}:443 was cut off: the program ended it (")
    assert "was no request of HTTP/1.1" in told[3]
    assert (net.lookups, called.egress) == ([], [])


@pytest.mark.driver("bubblewrap")
async def test_whatever_is_said_inside_goes_to_the_host_that_was_asked_for(wires: Cable, tmp_path: Path) -> None:
    """Another name in TLS, none, another ``Host``, other protocols offered: one server is reached, in HTTP/1.1."""
    requests: list[bytes] = []
    code = f"""
import socket, ssl
def ask(name, offered=(), head="GET /open/a HTTP/1.1\\r\\nHost: {NAME}", to="{NAME}:443"):
    plain = socket.create_connection(("127.0.0.1", 3128), timeout=10)
    plain.sendall(f"CONNECT {{to}} HTTP/1.1\\r\\n\\r\\n".encode())
    said = plain.recv(4096)
    if b" 200 " not in said:
        print(said.partition(b"\\r")[0].decode())
        return
    context = ssl.create_default_context()
    if name != "{NAME}":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if offered:
        context.set_alpn_protocols(offered)
    secure = context.wrap_socket(plain, server_hostname=name)
    secure.sendall(f"{{head}}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    said = b""
    while data := secure.recv(4096):
        said += data
    print(secure.selected_alpn_protocol(), said.partition(b"\\r")[0].decode())
ask("{OTHER_NAME}")
ask(None)
ask("{NAME}", head="GET /open/a HTTP/1.1\\r\\nHost: {OTHER_NAME}")
ask("{NAME}", ["h2", "http/1.1"])
ask("{NAME}", ["h2"], "PRI * HTTP/2.0\\r\\n\\r\\nSM")
ask("{NAME}", head="GET /open/a HTTP/1.1\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket")
ask(None, to="{SITE}:443")
"""
    text = profile("run_python", "bubblewrap", PAGES, tls="inspect", max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(ok(b"page"), requests), name=NAME)
        called = await box.call("run_python", code=code)
    lines = called.stdout.splitlines()
    assert lines[:4] == ["None HTTP/1.1 200 "] * 3 + ["http/1.1 HTTP/1.1 200 "], called
    assert lines[4].startswith("None HTTP/1.1 400 Glovebox: The first line is not a request line of HTTP/1.1."), called
    assert lines[5].startswith("None HTTP/1.1 400 Glovebox: WebSockets do not pass"), called
    assert lines[6].endswith("(egress.tunnel)"), called
    assert [request.count(f"Host: {NAME}\r\n".encode()) for request in requests] == [1] * 4
    assert not any(OTHER_NAME.encode() in request for request in requests)
    assert len(called.egress) == 5


@pytest.mark.parametrize("driver", DRIVERS)
async def test_one_connection_carries_requests_one_after_the_other(driver: str, wires: Cable, tmp_path: Path) -> None:
    """With and without bodies, in chunks too, and a refused one ends it; each is decided and recorded by itself."""
    requests: list[bytes] = []

    async def echo(stream: anyio.abc.ByteStream) -> None:
        head, _, body = (await read_head(stream)).partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
        while len(body) < length:
            body += await stream.receive()
        requests.append(head)
        await stream.send(ok(b"%d" % len(body)))

    code = f"""
import http.client, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
connection = http.client.HTTPSConnection(proxy.hostname, proxy.port, timeout=10)
connection.set_tunnel("{NAME}", 443)
def ask(*asked, **given):
    connection.request(*asked, **given)
    answer = connection.getresponse()
    print(answer.status, answer.read()[:70], answer.getheader("connection"), connection.sock is first)
connection.connect()
first = connection.sock
ask("GET", "/open/a")
ask("POST", "/open/b", body=b"x" * 300000)
ask("POST", "/open/c", body=iter([b"y" * 70000, b"z"]), encode_chunked=True)
ask("HEAD", "/open/d")
ask("GET", "/secret")
"""
    text = profile("run_python", driver, PAGES.replace('"GET"', '"GET", "HEAD"'), tls="inspect", max_connections=8)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, echo, name=NAME)
        called = await box.call("run_python", code=code)
    assert called.stdout.splitlines()[:4] == [
        "200 b'0' keep-alive True",
        "200 b'300000' keep-alive True",
        "200 b'70001' keep-alive True",
        "200 b'' keep-alive True",
    ], called
    assert called.stdout.splitlines()[4].startswith("403 b\"Glovebox: The path '/secret' is not allowed"), called
    assert [rule for _, rule, _ in called.egress] == ["network.allow[0]"] * 4 + ["egress.path"]
    assert [head.split(b" ")[0] for head in requests] == [b"GET", b"POST", b"POST", b"HEAD"]
    assert not any(b"chunked" in head for head in requests)


@pytest.mark.driver("bubblewrap")
async def test_requests_that_are_sent_ahead_wait_for_their_turn(wires: Cable, tmp_path: Path) -> None:
    """Forty in one write, and a client that does not read: each is answered once, in order."""
    code = f"""
import socket, ssl
plain = socket.create_connection(("127.0.0.1", 3128), timeout=15)
plain.sendall(b"CONNECT {NAME}:443 HTTP/1.1\\r\\n\\r\\n")
assert b" 200 " in plain.recv(4096)
secure = ssl.create_default_context().wrap_socket(plain, server_hostname="{NAME}")
secure.sendall(b"".join(b"GET /open/%d HTTP/1.1\\r\\n\\r\\n" % each for each in range(39))
               + b"GET /open/39 HTTP/1.1\\r\\nConnection: close\\r\\n\\r\\n")
got = b""
while data := secure.recv(65536):
    got += data
pages = [int(each.split(b"\\r\\n")[0]) for each in got.split(b"page ")[1:]]
print(got.count(b"HTTP/1.1 200"), pages == list(range(40)))
"""

    async def numbered(stream: anyio.abc.ByteStream) -> None:
        path = (await read_head(stream)).split(b" ")[1]
        await stream.send(ok(b"page " + path.rpartition(b"/")[2]))

    text = profile("run_python", "bubblewrap", PAGES, tls="inspect", max_connections=40)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, numbered, name=NAME)
        called = await box.call("run_python", code=code)
    assert called.stdout == "40 True\n", called


@pytest.mark.driver("bubblewrap")
async def test_events_of_a_stream_pass_as_they_come(wires: Cable, tmp_path: Path) -> None:
    """The server sends its second event only once the program has asked for something because of the first."""
    asked = anyio.Event()

    async def events(stream: anyio.abc.ByteStream) -> None:
        if b" /open/more " in await read_head(stream):
            asked.set()
            await stream.send(ok(b""))
            return
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await asked.wait()
        await stream.send(b"data: 2\n\n")

    code = f"""
import urllib.request
with urllib.request.urlopen("{URL}/open/events", timeout=10) as stream:
    print(stream.headers["content-type"], stream.readline(), stream.readline())
    urllib.request.urlopen("{URL}/open/more", timeout=10).read()
    print(stream.read())
"""
    text = profile("run_python", "bubblewrap", PAGES, tls="inspect", max_connections=2)
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, events, name=NAME)
        called = await box.call("run_python", code=code)
    assert called.stdout == "text/event-stream b'data: 1\\n' b'\\n'\nb'data: 2\\n\\n'\n", called


@pytest.mark.driver("bubblewrap")
async def test_bounds_hold_inside_and_records_say_what_came(wires: Cable, tmp_path: Path) -> None:
    """A body over the profile's bytes, one that breaks off, a redirect, a type that is none; control: whole ones."""
    pages = {
        "/open/big": ok(bytes(70000), "Content-Type: application/zip"),
        "/open/torn": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ntorn",
        "/open/moved": redirect("/open/whole", 307),
        "/open/whole": ok(b"whole", "Content-Type: Text/Plain; charset=x"),
        "/open/odd": ok(b"odd", "Content-Type: <script>alert(1)</script>"),
    }
    code = f"""
import http.client, urllib.request
for path in ("big", "torn", "moved", "odd"):
    try:
        print(len(urllib.request.urlopen(f"{URL}/open/{{path}}", timeout=10).read()))
    except http.client.IncompleteRead as cut:
        print("cut", len(cut.partial))
"""
    text = profile(
        "run_python", "bubblewrap", PAGES, tls="inspect", max_connections=8, max_bytes="64 KiB", max_redirects=1
    )
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, site(pages), name=NAME)
        called = await box.call("run_python", code=code)
    assert called.stdout.splitlines() == ["cut 65536", "cut 4", "5", "3"], called
    assert called.answered == [
        (200, "application/zip", 65536, False),
        (200, None, 4, False),
        (307, None, 0, True),
        (200, "text/plain", 5, True),
        (200, None, 3, True),
    ]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_ordinary_client_uses_a_key_that_its_sandbox_never_has(
    driver: str, wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker adds it to what came out of the program's own TLS; an answer that hands it back has it replaced."""
    key = "Zq8fk2Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0Tj"
    monkeypatch.setenv("DOCS_TOKEN", key)
    requests: list[bytes] = []
    text = profile("run_python", driver, PAGES, tls="inspect", max_connections=2).replace("[limits]", LENT)
    code = f"{URLLIB}\nget('{URL}/open/me', headers={{'Authorization': 'Bearer mine'}})\nget('{URL}/open/other')"
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, answering(ok(f"you said {key}".encode()), requests), name=NAME)
        called = await box.call("run_python", code=code)
    assert called.stdout.count("200 b'you said [credential docs]'") == 2, called
    assert f"Authorization: Bearer {key}\r\n".encode() in requests[0]
    assert b"authorization" not in requests[1].lower()
    assert b"mine" not in requests[0]
    decided = [record.data.get("credential") for record in called.records if record.kind == "egress.decided"]
    assert decided == ["docs", None]
    assert key not in repr(called)


LENT = """[[network.credential]]
name = "docs"
host = "docs.example.org"
paths = ["/open/me"]
header = "Authorization"
prefix = "Bearer "
source = "env:DOCS_TOKEN"
[limits]"""

#: What a hostile program says to whoever ends its TLS; after it the same request as ever.
HOSTILE = """
import os, socket, ssl, struct, urllib.request
context = ssl.create_default_context()
def connected():
    plain = socket.create_connection(("127.0.0.1", 3128), timeout=10)
    plain.sendall(b"CONNECT docs.example.org:443 HTTP/1.1\\r\\n\\r\\n")
    assert b" 200 " in plain.recv(4096)
    return plain
def secured():
    return context.wrap_socket(connected(), server_hostname="docs.example.org")
def hello():
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(came, goes, server_hostname="docs.example.org").do_handshake()
    except ssl.SSLWantReadError:
        return goes.read()
def say(data, stream):
    try:
        stream.sendall(data)
        return stream.recv(65536)
    except OSError:
        return b""
first = hello()
for garbage in (b"", b"\\x16", b"\\x16\\x03\\x01\\xff\\xff" + bytes(70000), b"\\x15\\x03\\x03\\x00\\x02\\x02\\x28",
                first[:60], first + first, first + b"\\x17\\x03\\x03\\x40\\x00" + bytes(16384), os.urandom(5000)):
    one = connected()
    say(garbage, one) if garbage not in (b"", b"\\x16", first[:60]) else one.sendall(garbage)
    one.close()
early = socket.create_connection(("127.0.0.1", 3128), timeout=10)
early.sendall(b"CONNECT docs.example.org:443 HTTP/1.1\\r\\n\\r\\n" + first)
reset = secured()
reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
reset.sendall(b"GET /open/big HTTP/1.1\\r\\n\\r\\n")
reset.close()
print(b" 400 " in say(b"\\0" * 30000, secured()))
print(b" 400 " in say(b"GET https://other.example.org/ HTTP/1.1\\r\\n\\r\\n", secured()))
print(b" 400 " in say(b"CONNECT other.example.org:443 HTTP/1.1\\r\\n\\r\\n", secured()))
print(b" 400 " in say(b"POST /open/a HTTP/1.1\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nzz\\r\\n", secured()))
print(b" 403 " in say(b"POST /secret HTTP/1.1\\r\\nContent-Length: 3000000\\r\\n\\r\\n" + bytes(3000000), secured()))
slow = [secured() for _ in range(4)]
for one in slow:
    one.sendall(b"GET /open/big HTTP/1.1\\r\\n\\r\\n" * 3)  # and never read
crowd = [connected() for _ in range(20)]
for one in crowd:
    one.sendall(first[:100])
for one in (*crowd, *slow, early):
    one.close()
print(urllib.request.urlopen("https://docs.example.org/open/a", timeout=10).status)
"""


@pytest.mark.driver("bubblewrap")
async def test_a_program_cannot_hurt_what_ends_its_tls(wires: Cable, tmp_path: Path) -> None:
    """Torn and forged records, resets, readers that do not read: each costs its connection, and nothing else."""
    big = ok(bytes(4 << 20))

    async def serve(stream: anyio.abc.ByteStream) -> None:
        await stream.send(big if b"/open/big " in await read_head(stream) else ok(b"page"))

    text = profile("run_python", "bubblewrap", PAGES, tls="inspect", max_connections=32, max_bytes="8 MiB")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[NAME] = [[SITE]]
        await net.serve(SITE, 443, serve, name=NAME)
        called = await box.call("run_python", code=HOSTILE)
    assert called.stdout.splitlines() == ["True"] * 5 + ["200"], called
    assert called.usage["memory_peak_bytes"] < 128 << 20


@pytest.mark.driver("bubblewrap")
async def test_a_program_cannot_have_certificates_made_without_end(wires: Cable, tmp_path: Path) -> None:
    """A thousand hosts of a wildcard: 128 get one, the others a refusal; control: those that have one keep it."""
    code = f"""
import collections, socket
def ask(name):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as plain:
        plain.sendall(f"CONNECT {{name}}.{NAME}:443 HTTP/1.1\\r\\n\\r\\n".encode())
        return plain.recv(4096).split(b" ")[1].decode()
print(collections.Counter(ask(f"n{{number}}") for number in range(1000)), ask("n0"))
"""
    text = profile("run_python", "bubblewrap", f'{{ host = "*.{NAME}" }}', tls="inspect")
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        called = await box.call("run_python", code=code)
    assert called.stdout == "Counter({'403': 872, '200': 128}) 200\n", called
    assert {rule for _, rule, _ in called.egress} == {"egress.attempts"}
    assert len(called.egress) <= EgressLimits().attempts + 1
    assert net.lookups == []
