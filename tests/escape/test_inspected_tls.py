"""Programs' own TLS that ends inside their sandbox: what ordinary clients reach, and what they do not."""

from pathlib import Path

import pytest
from tests.fixtures.brokered import DRIVERS, glovebox, profile
from tests.fixtures.internet import OTHER, SITE, Cable, answering, internet, ok, wires

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
