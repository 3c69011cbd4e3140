"""What a sandbox may say beside a URL: a short list, and nothing that makes another request of it."""

from typing import Any

import pytest
from pydantic import ValidationError

from glovebox_profiles.model import Credential
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.events import EgressLimits
from glovebox_server.egress.request import request_headers

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


#: As the profile's keys and by their kinds: what authenticates, frames, routes or overrides.
REFUSED = """
    Authorization Cookie Cookie2 Proxy-Authorization X-Api-Key Api-Key X-Goog-Api-Key X-Auth-Token X-Access-Token
    Private-Token X-Amz-Security-Token X-CSRF-Token X-Session-Id DD-APPLICATION-KEY Ocp-Apim-Subscription-Key
    X-Shopify-Access-Token
    X-Hub-Signature X-Real-IP True-Client-IP CF-Connecting-IP X-Remote-User X-SSL-Client-Cert X-Authenticated-User
    Host Content-Length Transfer-Encoding Connection Keep-Alive TE Trailer Upgrade Expect Range If-Range Request-Range
    Content-Type Content-Encoding Content-Range Accept-Encoding HTTP2-Settings Max-Forwards Proxy-Connection
    Proxy-Anything Forwarded X-Forwarded-For X-Forwarded-Host X-HTTP-Method X-HTTP-Method-Override
    X-Method-Override X-Original-URL X-Original-Host X-Rewrite-URL X-Host
    Via Destination Depth Overwrite Alt-Used Front-End-Https Early-Data
    Sec-Fetch-Mode
"""
NEEDED = """
    anthropic-version anthropic-beta Notion-Version X-GitHub-Api-Version Idempotency-Key Stripe-Version
    Stripe-Account OpenAI-Organization OpenAI-Beta X-Request-Id Prefer X-GitHub-Media-Type Accept-Charset If-Match
    X-Shopify-Api-Version
"""


def credential(**changed: Any) -> Credential:
    given = {"name": "key", "host": "a.example.org", "paths": ("/*",), "header": "X-Own", "source": "env:KEY"}
    return Credential.model_validate(given | changed)


@pytest.mark.parametrize("name", REFUSED.split())
def test_a_profile_cannot_name_a_header_that_authenticates_frames_routes_or_overrides(name: str) -> None:
    """In any case, for the program or as a fixed one."""
    for written in (name, name.upper(), name.lower()):
        for given in ({"headers": (written,)}, {"set_headers": {written: "x"}}):
            with pytest.raises(ValidationError, match=f"{name.lower()} (authenticates|frames, routes or overrides)"):
                credential(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"headers": ("x-OWN",)}, "x-own is where the key stands"),
        ({"set_headers": {"X-Own": "x"}}, "x-own is where the key stands"),
        ({"headers": ("Prefer", "prefer")}, "prefer is named twice"),
        ({"headers": ("Prefer",), "set_headers": {"PREFER": "x"}}, "prefer is named twice"),
        ({"headers": ("X_Original_URL",)}, "pattern"),
        ({"headers": ("Prefer:",)}, "pattern"),
        ({"headers": ("Prefer\n",)}, "pattern"),
        ({"set_headers": {"Prefer": "a\r\nX-B: c"}}, "pattern"),
        ({"set_headers": {"Prefer": "a\n"}}, "pattern"),
        ({"set_headers": {"Prefer": " a"}}, "pattern"),
        ({"set_headers": {"Prefer": ""}}, "pattern"),
        ({"set_headers": {"Prefer": "é"}}, "pattern"),
        ({"set_headers": {"Prefer": "a" * 257}}, "256"),
        ({"headers": tuple(f"X-{n}" for n in range(17))}, "16"),
    ],
)
def test_a_profile_that_names_headers_wrongly_is_refused(given: dict[str, Any], why: str) -> None:
    """With the reason; the control is the next test."""
    with pytest.raises(ValidationError, match=why):
        credential(**given)


def test_headers_that_apis_require_cross_with_a_key_alone() -> None:
    """The program's where they are named, once and as plain text, and fixed ones whatever the program says."""
    lent = credential(headers=NEEDED.split(), set_headers={"X-Fixed": "always", "Accept": "application/json"})
    said = [*((name, "x") for name in NEEDED.split()), ("x-fixed", "mine"), ("x-other", "x"), ("accept", "mine")]
    passed, dropped = request_headers(said, "GET", b"", EgressLimits(), lent)
    assert {name.lower() for name in NEEDED.split()} <= dict(passed).keys()
    assert (dict(passed)["x-fixed"], dict(passed)["accept"]) == ("always", "application/json")
    assert len(dict(passed)) == len(passed)
    assert dropped == ("'x-fixed'", "'x-other'", "'accept'")
    without, _ = request_headers(said, "GET", b"", EgressLimits())
    assert dict(without).keys() == {"if-match", "accept", "user-agent", "accept-encoding"}
    for bad in ([("prefer", "a"), ("Prefer", "b")], [("prefer", "a\r\nx-b: c")]):
        with pytest.raises(RefusedError):
            request_headers(bad, "GET", b"", EgressLimits(), lent)
