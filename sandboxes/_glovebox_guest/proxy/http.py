"""Parses and writes HTTP/1.1 for the sandbox's proxy. Pure: no sockets, no wire. See ``proxy.listener``.

Parsing is strict and short, because the host parses everything again: only the stream to open and the length of the
body matter here (RFC 9112).
"""

from __future__ import annotations

from _glovebox_guest.stdlib import Any, Mapping

MAX_HEAD = 24 * 1024
"""Bytes of a request line with the longest URL the host reads, and of twice the headers it takes."""
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
# Of the connection to the proxy, or set anew by the host: dropped without a notice.
_OURS = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te",
     "trailer", "transfer-encoding"}
)  # fmt: skip
_HEX = frozenset(b"0123456789abcdefABCDEF")
_UNBOUNDED = 1 << 62
_BODILESS = (204, 304)
_MAX_LINE = 1024
"""Bytes of a line between chunks: a number and, rarely, an extension that is ignored."""
_MAX_TRAILERS = 64
"""Lines after the last chunk; none of them is forwarded."""


class BadRequestError(Exception):
    """The bytes are not a request to a proxy; the text has the reason."""


class Chunks:
    """Decoder of a chunked body (RFC 9112 section 7.1)."""

    def __init__(self) -> None:
        self.over = False
        self.problem = ""
        """Why decoding failed."""
        self.rest = b""
        """Bytes after its end."""
        self._held = bytearray()
        self._left = 0  # of the chunk that has begun
        self._reads = self._size
        self._trailers = 0

    def feed(self, data: bytes) -> bytes:
        """Return the payload of these bytes: never longer than they are."""
        carried = bytearray()
        self._held += data
        while not self.over and not self.problem:
            if self._left:
                piece = self._held[: self._left]
                del self._held[: self._left]
                self._left -= len(piece)
                carried += piece
                if self._left:
                    break
            end = self._held.find(b"\r\n")
            if end < 0:
                self.problem = "The body is not in chunks." if len(self._held) > _MAX_LINE else ""
                break
            line = bytes(self._held[:end])
            del self._held[: end + 2]
            self._reads(line)
        if self.over:
            self.rest = bytes(self._held)
        return bytes(carried)

    def _size(self, line: bytes) -> None:
        size = line.partition(b";")[0].rstrip(b" \t")
        if len(line) > _MAX_LINE or not 0 < len(size) <= 8 or not _HEX.issuperset(size):
            self.problem = "A chunk of the body has no size."
            return
        self._left = int(size, 16)
        self._reads = self._end if self._left else self._trailer

    def _end(self, line: bytes) -> None:
        self.problem = "A chunk of the body is longer than its size." if line else ""
        self._reads = self._size

    def _trailer(self, line: bytes) -> None:
        self._trailers += 1
        self.over = not line
        if self._trailers > _MAX_TRAILERS or len(line) > _MAX_LINE:
            self.problem = "The body has too much behind it."


class ProxyRequest:
    """A request for a tunnel, or with an absolute URL: the host sends that, and the answer is chunked."""

    expects = keeps = False
    """The client waits for a word before the body; the connection stays open for another request."""
    chunks: Chunks | None = None
    body = _UNBOUNDED

    def __init__(self, kind: str, asked: str, meta: Mapping[str, Any]) -> None:
        self.kind = kind
        self.asked = f"The {asked[:150]}"
        self.meta = meta
        self._chunked = kind == "request" and meta["method"] != "HEAD"

    def head(self, note: Mapping[str, Any]) -> bytes:
        """Return the answer's head, from the host's note."""
        if self.kind == "connect":
            return b"HTTP/1.1 200 Connection established\r\n\r\n"
        headers = [f"{name}: {value}" for name, value in note["headers"]]
        if note["hops"]:  # the host has followed redirects, and links in the page are relative to where it came from
            headers = [header for header in headers if not header.startswith("content-location:")]
            headers.append(f"content-location: {note['url']}")
        if note["dropped"]:
            # The host quotes names that a program wrote.
            headers.append(f"glovebox-left-out: {', '.join(name.strip(chr(39)) for name in note['dropped'])}")
        # Chunks, so that a truncated body cannot be taken for a whole one.
        self._chunked = self._chunked and note["status"] not in _BODILESS
        headers += ["transfer-encoding: chunked"] * self._chunked
        headers.append(f"connection: {'keep-alive' if self.keeps else 'close'}")
        return "\r\n".join([f"HTTP/1.1 {note['status']} ", *headers, "", ""]).encode("latin-1", "replace")

    def data(self, data: bytes) -> bytes:
        """Encode the host's bytes."""
        if self.kind == "connect":
            return data
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else b""

    def last(self) -> bytes:
        """Return the final bytes."""
        return b"0\r\n\r\n" if self._chunked else b""


def parse(data: bytes, end: int, authority: str = "") -> ProxyRequest:
    """Parse a request's head; raises BadRequestError.

    ``end`` is that of the head's last line; negative where the head exceeds MAX_HEAD. ``authority`` is host and port of
    the server inside TLS; empty for a request to the proxy.
    """
    if end < 0:
        raise BadRequestError(f"The request's head is longer than {MAX_HEAD} bytes.")
    first, *lines = data[:end].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequestError("The first line is not a request line of HTTP/1.1.")
    method, target, version = words
    headers = [_header(line) for line in lines]
    if authority:
        if not target.startswith("/"):
            raise BadRequestError("A request to a server names a path.")
        target = f"https://{authority.removesuffix(':443')}{target}"
    elif method == "CONNECT":
        return ProxyRequest("connect", f"tunnel to {plain(target)}", {"authority": target[:512]})
    if "://" not in target:
        raise BadRequestError("A request to a proxy names an absolute URL.")
    if any(name == "upgrade" and "websocket" in value.lower() for name, value in headers):
        raise BadRequestError("WebSockets do not pass: requests and their answers do, streams of events too.")
    if version != "HTTP/1.1":
        raise BadRequestError("Requests are taken in HTTP/1.1 only.")
    kept = [[name, value] for name, value in headers if name not in _OURS]
    asked = f"response to {plain(method)} {plain(target)}"
    request = ProxyRequest("request", asked, {"method": method, "url": target, "headers": kept})
    request.chunks, request.body = _body(headers)
    closes = any(name == "connection" and "close" in value.lower() for name, value in headers)
    request.keeps = bool(authority) and not closes
    request.expects = any(name == "expect" for name, _ in headers)
    return request


def refusal(status: int, rule: str, reason: str, hint: str) -> bytes:
    """Return a complete response with the reason of a refusal."""
    message = f"{plain(reason)} {plain(hint)}".strip()
    body = f"Glovebox: {message} ({plain(rule)})\n".encode("ascii")
    # For a refused tunnel most clients show the status line alone.
    head = (
        f"HTTP/1.1 {status} Glovebox: {message[:600]} ({plain(rule)})\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def plain(text: str) -> str:
    """Replace everything except printable ASCII in ``text``: it goes into a status line."""
    return "".join(each if " " <= each <= "~" else "?" for each in text)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or not _TOKEN.issuperset(name):
        raise BadRequestError(f"{plain(line)[:60]!r} is not a header.")
    return name.lower(), value.strip(" \t")


def _body(headers: list[tuple[str, str]]) -> tuple[Chunks | None, int]:
    """Return the decoder of a body in chunks, and the bytes of any other; the host bounds both."""
    lengths = {value for name, value in headers if name == "content-length"}
    codings = [value.lower() for name, value in headers if name == "transfer-encoding"]
    if codings:
        if codings != ["chunked"] or lengths:
            raise BadRequestError("A body has its Content-Length, or comes in chunks and nothing else.")
        return Chunks(), _UNBOUNDED
    length = lengths.pop() if lengths else "0"
    if lengths or not (length.isascii() and length.isdigit() and len(length) <= 12):
        raise BadRequestError("The Content-Length is not one number.")
    return None, int(length)
