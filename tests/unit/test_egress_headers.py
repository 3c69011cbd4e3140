"""What a sandbox may say beside a URL: a short list, and nothing that makes another request of it."""

import pytest

from glovebox_server.egress.headers import request_headers
from glovebox_server.egress.limits import EgressLimits

PASSED = [
    "Accept", "Accept-Language", "If-Match", "If-Modified-Since", "If-None-Match", "If-Unmodified-Since", "User-Agent",
]  # fmt: skip
LEFT_OUT = """
    Range If-Range Request-Range Accept-Encoding Accept-Charset TE Trailer Transfer-Encoding Content-Length
    Content-Encoding Content-Type Content-Range Connection Keep-Alive Proxy-Connection Upgrade
    Upgrade-Insecure-Requests HTTP2-Settings Expect Max-Forwards X-HTTP-Method-Override X-HTTP-Method
    X-Method-Override X-Original-URL X-Original-Host X-Rewrite-URL X-Host Forwarded X-Forwarded-For
    X-Forwarded-Host X-Forwarded-Proto X-Forwarded-Prefix X-Real-IP True-Client-IP Via Host Origin Referer
    Cookie Authorization Proxy-Authorization X-Api-Key Destination Depth Overwrite Front-End-Https Alt-Used
    Cache-Control Pragma Priority Early-Data Sec-WebSocket-Key Sec-Fetch-Mode X-Anything
"""


def sent(*names: str, method: str = "GET") -> tuple[dict[str, str], tuple[str, ...]]:
    """What is sent of these, and the names of what is not."""
    passed, dropped = request_headers([(name, "x") for name in names], method, b"", EgressLimits())
    return dict(passed), dropped


@pytest.mark.parametrize("name", LEFT_OUT.split())
def test_a_header_that_is_not_on_the_list_is_left_out_and_named(name: str) -> None:
    """Ranges, method overrides, rewritten URLs, framing, credentials: none crosses, in any case."""
    for written in (name, name.upper(), name.lower()):
        passed, dropped = sent(written)
        assert passed.get(name.lower()) != "x"
        assert dropped == (f"'{name.lower()}'",)
        assert passed.keys() == {"user-agent", "accept", "accept-encoding"}


def test_what_is_on_the_list_crosses() -> None:
    """The control; with a body its type does too, and what is compressed is ours to say."""
    passed, dropped = sent(*PASSED)
    assert (dropped, {name.lower() for name in PASSED} - passed.keys()) == ((), set())
    assert passed["accept-encoding"] == "gzip, deflate"
    assert sent("Content-Type", method="POST")[0]["content-type"] == "x"
