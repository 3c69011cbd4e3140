"""Hostile inputs over HTTP: bodies, heads and programs, each as the requests that are sent at once."""

import json
from collections.abc import Callable, Iterator
from typing import Any

_MODERN = "2026-07-28"
_MOST = 1 << 20
Requests = Callable[[], list[bytes]]


def get(port: int, token: str, path: str) -> bytes:
    """One request without a body, on a connection that is kept."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def post(  # noqa: PLR0917 - a request has these parts
    port: int,
    token: str,
    body: bytes,
    method: str = "tools/call",
    name: str = "run_python",
    more: str = "",
    version: str = _MODERN,
    *,
    last: bool = True,
) -> bytes:
    """One request to /mcp in the modern era; the connection ends with it unless it is not the last."""
    routed = f"Mcp-Protocol-Version: {version}\r\n" if version else ""
    routed += f"Mcp-Method: {method}\r\nMcp-Name: {name}\r\n" if version == _MODERN else ""
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
        f"Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n{routed}{more}"
        f"{'Connection: close' if last else 'X: y'}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def message(method: str, params: bytes, identity: bytes = b"1") -> bytes:
    """One JSON-RPC request whose ``params`` are bytes that go in before the ``_meta``."""
    meta = b'"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",'
    meta += b'"io.modelcontextprotocol/clientCapabilities":{}}'
    start = b'{"jsonrpc":"2.0","id":' + identity + b',"method":' + json.dumps(method).encode() + b',"params":{'
    return start + params + (b"," if params else b"") + meta + b"}}"


def call(tool: str, arguments: Any) -> bytes:
    """A ``tools/call``; arguments may be bytes of JSON."""
    text = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
    return message("tools/call", b'"name":' + json.dumps(tool).encode() + b',"arguments":' + text)


def _filled(start: bytes, part: bytes, end: bytes, most: int = _MOST - 1000) -> bytes:
    return start + part * ((most - len(start) - len(end)) // len(part)) + end


def _bodies() -> Iterator[tuple[str, bytes]]:
    array = b'{"code":'
    yield "1 MiB of nested arrays", call("run_python", _filled(array + b"[", b"[[[[]]]],", b"0]}"))
    yield "1 MiB of empty arrays", call("run_python", _filled(array + b"[", b"[],", b"0]}"))
    yield "1 MiB of zeros", call("run_python", _filled(array + b"[", b"0,", b"0]}"))
    yield "as many arrays as may be", call("run_python", _filled(array + b"[", b"[],", b"0]}", 45_000))
    yield "as many numbers as may be", call("run_python", _filled(array + b"[", b"1.5e-300,", b"0]}", 290_000))
    keys = ",".join(f'"k{n}":0' for n in range(15_000))
    yield "as many arguments as may be", call("run_python", f"{{{keys}}}".encode())
    inner = call("run_python", b'{"code":{' + keys.encode() + b"}}")
    yield "as many keys in an argument as may be", inner
    yield "many keys", call("run_python", ("{" + ",".join(f'"k{n}":0' for n in range(70_000)) + "}").encode())
    yield "duplicate keys", call("run_python", _filled(b"{", b'"a":0,', b'"a":0}', 180_000))
    objects = call("run_python", _filled(array + b"[", b'{"a":0},', b"0]}", 80_000))
    yield "as many objects as may be", objects
    yield "deep nesting", call("run_python", array + b"[" * 500_000 + b"]" * 500_000 + b"}")
    yield "huge numbers", call("run_python", _filled(array + b"[", b"9" * 309 + b",", b"0]}"))
    yield "a number of 1 MiB", call("run_python", _filled(array, b"7", b"}"))
    yield "a fraction of 1 MiB", call("run_python", _filled(array + b"0.", b"7", b"}"))
    yield "a text of 1 MiB", call("run_python", _filled(array + b'"', b"a", b'"}'))
    yield "escapes of 1 MiB", call("run_python", _filled(array + b'"', b"\\u00e9", b'"}'))
    yield "backslashes of 1 MiB", call("run_python", _filled(array + b'"', b"\\\\", b'"}'))
    yield "brackets in a text of 1 MiB", call("run_python", _filled(array + b'"', b'\\"[', b'"}'))
    yield "a long tool name", call("t" * (_MOST - 1000), {})
    yield "a long tool name of escapes", call("é" * 170_000, {})
    yield "a long method", message("m" * (_MOST - 1000), b"")
    yield "a long id", message("tools/list", b"", b'"' + b"i" * (_MOST - 1000) + b'"')
    yield (
        "a long progress token",
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":'
        + _filled(b'{"_meta":{"progressToken":"', b"p", b'"}}}'),
    )
    yield "a long address", message("resources/read", _filled(b'"uri":"', b"u", b'"'))
    yield "a long address of an artifact", message("resources/read", _filled(b'"uri":"artifact://', b"a", b'"'))
    uris = b",".join(b'"audit://calls/c_%026d"' % n for n in range(30_000))
    yield "a batch of arrays", b"[" + b"[]," * 16_000 + b"[]]"
    yield "a batch of requests", b"[" + b",".join([b'{"jsonrpc":"2.0","id":1,"method":"ping"}'] * 4_000) + b"]"
    yield "many inputs", call("run_python", b'{"code":"1","inputs":[' + b",".join([b'"artifact://x"'] * 30_000) + b"]}")
    yield "the longest program", call("run_python", {"code": "#" + "é" * 262_000})
    yield "the longest program of plain text", call("run_python", {"code": "#" + "1.0," * 65_000})
    yield "a hostile pattern", call("search_workspace", {"pattern": "(a+)+$", "path": "**/" * 300 + "*"})
    yield "a hostile glob", call("list_workspace_files", {"pattern": "{a,b}" * 190})
    yield (
        "a listener to many addresses",
        message("subscriptions/listen", b'"notifications":{"resourceSubscriptions":[' + uris + b"]}"),
    )


PIPE = """
import fcntl, os, struct
value = b"[" + b"[]," * 349_000 + b"0]"
picture = b"image/png\\0\\x89PNG\\r\\n\\x1a\\n" + bytes(8_000_000)
small = b"[" + b"0," * 32_000 + b"0]"
text = b'{"value": "' + b"\\\\u00e9" * 170_000 + b'"}'
def frame(kind, payload):
    return struct.pack("!BI", ord(kind), len(payload)) + payload
def write(data):
    for number in WRITABLE:
        view = memoryview(data)
        while view:
            view = view[os.write(number, view):]
WRITABLE = []
for number in range(3, 256):
    try:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            WRITABLE.append(number)
    except OSError:
        pass
"""

PROGRAMS = {
    "60 forged values of 1 MiB": PIPE + "write(frame('J', value) * 60)",
    "a forged value of as much as may be": PIPE + "write(frame('J', small))",
    "a forged value that is a long text": PIPE + "write(frame('J', text))",
    "forged pictures": PIPE + "write(frame('B', picture) * 8)",
    "tiny forged frames": PIPE + "write(frame('B', b'') * 1_000_000)",
    "a flood of standard output": "import os\nfor _ in range(3000): os.write(1, b'x' * 65536)",
    "a flood of lines": "import os\nfor _ in range(200_000): os.write(1, b'line\\n')",
    "a flood on both outputs": "import os\nfor _ in range(100_000): os.write(1, b'o'); os.write(2, b'e')",
    "output that is no text": "import os\nfor _ in range(300): os.write(1, bytes(range(128, 256)) * 512)",
    "a long value": "'é' * 10_000_000",
    "a value of 10,000 rows": "'\\n'.join(f'{n}, {n * n}, [{n}]' for n in range(10_000))",
    "a long error": "raise ValueError('x' * 10_000_000)",
    "a flood of files": "for n in range(20_000): open(f'/output/{n}', 'w').close()",
    "files with long names": "for n in range(2_000): open('/output/' + f'{n}' + 'é' * 120, 'w').close()",
    "large files": "for n in range(8): open(f'/output/{n}', 'wb').write(bytes(4_000_000))",
    "eight large figures": (
        "import numpy, matplotlib.pyplot as plt\n"
        "for _ in range(8): plt.figure(figsize=(10, 10), dpi=100); plt.imshow(numpy.random.rand(900, 900))"
    ),
}


def over_http(make: Callable[..., bytes], port: int, token: str) -> Iterator[tuple[str, Requests]]:
    """Names of the inputs, and what is sent of each."""
    for name, body in _bodies():
        method = json.loads(body)["method"] if name.startswith(("a l",)) and body[:1] == b"{" else "tools/call"
        method = method if len(method) < 100 else "m"
        yield f"body: {name}", lambda body=body, method=method: [make(body, method)]  # type: ignore[misc]
        yield f"body: {name}, handshake era", lambda body=body: [make(body, version="")]  # type: ignore[misc]
    ping = make(message("ping", b""), "ping", last=False)
    yield "pipelined requests", lambda: [ping * 2_000 + make(message("ping", b""), "ping")]
    headers = "".join(f"h{n}: v\r\n" for n in range(100_000))
    yield "100,000 headers", lambda: [make(b"{}", more=headers)]
    yield "as many headers as may be", lambda: [make(b"{}", more="a:\r\n" * 15_000)]
    yield "a long target", lambda: [get(port, token, "/" + "%2e/" * 15_000)]
    yield "a long query", lambda: [get(port, token, "/messages/?" + "a=b&" * 15_000)]
    parts = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    opening = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parts}).encode()
    yield "200 sessions opened and dropped", lambda: [make(opening, version="")] * 200
    arrays = call("run_python", _filled(b'{"code":[', b"[],", b"0]}", 45_000))
    yield "100 bodies of as much as may be at once", lambda: [make(arrays)] * 100
    yield (
        "100 bodies of 1 MiB of text at once",
        lambda: [make(call("run_python", _filled(b'{"code":"', b"a", b'"}')))] * 100,
    )
    for name, code in PROGRAMS.items():
        yield f"program: {name}", lambda code=code: [make(call("run_python", {"code": code}))]  # type: ignore[misc]
    floods = make(call("run_python", {"code": PROGRAMS["a flood of standard output"]}))
    yield "12 programs that flood their output", lambda: [floods] * 12
    forged = make(call("run_python", {"code": PROGRAMS["60 forged values of 1 MiB"]}))
    yield "12 programs that forge values", lambda: [forged] * 12
