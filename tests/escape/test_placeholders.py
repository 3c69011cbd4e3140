"""Placeholders: what a program holds in place of a key, and the one place where the broker puts the key for it."""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import glovebox, profile
from tests.fixtures.guest_streams import Denied
from tests.fixtures.internet import OTHER, SITE, Cable, answering, fetch, internet, ok, wires

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import Credential
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.guards.credentials.injector import CredentialInjector, make_placeholder
from glovebox_server.guards.credentials.sources import CredentialValue, unusable

__all__ = ["wires"]

API, ELSEWHERE = "api.example.org", "other.example.org"
KEY = "ghp_" + "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3/+6Gs0Pj2Aa1E"
RULES = tuple(EgressRule.model_validate({"host": host, "methods": ["GET", "POST"]}) for host in (API, ELSEWHERE))


def credential(**changed: Any) -> Credential:
    """A key that programs ask for by a placeholder."""
    given = {"name": "tracker", "host": API, "methods": ("GET", "POST"), "paths": ("/v1/*",), "prefix": "Bearer ",
             "header": "Authorization", "source": "env:UNUSED", "env": "TRACKER_TOKEN"}  # fmt: skip
    return Credential.model_validate(given | changed)


async def lender(*credentials: Credential) -> tuple[CredentialInjector, str]:
    """A lender with its placeholders made, and the first of them."""

    async def read(_source: str) -> CredentialValue:
        return CredentialValue(text=KEY)

    lent = CredentialInjector(credentials=credentials or (credential(),), read=read)
    return lent, (await lent.prepare_environment())["TRACKER_TOKEN"]


def basic(user: str, password: str) -> str:
    """RFC 7617."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def pass_on(lent: CredentialInjector, url: str, **asked: Any) -> EgressAttempt:
    """What becomes of a request at the injector, which reads no network."""
    attempt = EgressAttempt(**{"kind": "request", "asked": url, **asked})
    target = parse_url("POST" if attempt.body else "GET", url)
    await lent.find_stray(attempt, target)
    await lent.inject(attempt, target)
    return attempt


TAKEN = {
    "bearer": (lambda p: f"Bearer {p}", f"Bearer {KEY}"),
    "token": (lambda p: f"token {p}", f"token {KEY}"),
    "alone": (lambda p: p, f"Bearer {KEY}"),
    "basic": (lambda p: basic("x-access-token", p), basic("x-access-token", KEY)),
    "basic, the user": (lambda p: basic(p, ""), basic(KEY, "")),
}


@pytest.mark.parametrize(("say", "sent"), TAKEN.values(), ids=TAKEN)
async def test_a_placeholder_where_the_key_stands_becomes_the_key(wires: Cable, say: Any, sent: str) -> None:
    """In the ways in which clients say it; the header is not told to be left out, and an echo is replaced."""
    lent, held = await lender()
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(sent.encode()), requests), name=API)
        fetched = await fetch(net.gate(*RULES, lender=lent), f"https://{API}/v1/me",
                              headers=[("authorization", say(held))])  # fmt: skip
    assert f"Authorization: {sent}\r\n".encode() in requests[0]
    assert held.encode() not in requests[0]
    assert requests[0].lower().count(b"authorization:") == 1
    assert KEY.encode() not in fetched.body
    assert KEY not in sent or fetched.body == sent.replace(KEY, "[credential tracker]").encode()
    assert b"[credential tracker]" in fetched.body
    assert fetched.head.said["dropped"] == ()
    assert [each.credential for each in net.attempts] == ["tracker"]


async def test_a_placeholder_in_the_parameter_becomes_the_key(wires: Cable) -> None:
    """In its place among the others; the URL that is handed back has the placeholder, which is worth nothing."""
    lent, held = await lender(credential(header=None, prefix="", query="key"))
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(b""), requests), name=API)
        fetched = await fetch(net.gate(*RULES, lender=lent), f"https://{API}/v1/me?a=1&key={held}&b=2")
        assert requests[0].startswith(f"GET /v1/me?a=1&key={quote(KEY, safe='')}&b=2 HTTP/1.1\r\n".encode())
        assert fetched.head.said["url"] == f"https://{API}/v1/me?a=1&key={held}&b=2"
        twice = await fetch(net.gate(*RULES, lender=lent), f"https://{API}/v1/me?key={held}&k%65y=1")
        assert isinstance(twice.last, Denied)
        assert twice.last.rule == "egress.credential"


X_KEY = {"header": "X-Key", "prefix": ""}
WRITTEN: list[tuple[dict[str, str], str, str]] = [
    ({}, "token P", f"token {KEY}"),
    ({}, "Basic (u-1.a@b:P)", basic("u-1.a@b", KEY)),
    ({}, "bASIC (:P)", basic("", KEY)),
    ({}, "Basic (P:)", basic(KEY, "")),
    ({}, f"Basic ({'u' * 64}:P)", basic("u" * 64, KEY)),
    ({}, f"Basic ({'u' * 65}:P)", ""),
    ({}, "Basic (a b\r\nX: y:P)", ""),
    ({}, "Basic (P:x)", ""),
    ({}, "Basic (P)", ""),
    ({}, "Basic (\xff:P)", ""),
    ({}, "Basic *(u:P)", ""),
    ({}, "Digest (u:P)", ""),
    ({}, "Bearer P, x", ""),
    (X_KEY, "P", KEY),
    (X_KEY, "Bearer P", ""),
    (X_KEY, "Basic (u:P)", ""),
    (X_KEY | {"prefix": "Key "}, "P", f"Key {KEY}"),
]


@pytest.mark.parametrize(("changed", "said", "sent"), WRITTEN)
async def test_a_key_is_written_as_clients_write_it(changed: dict[str, str], said: str, sent: str) -> None:
    """Schemes belong to ``Authorization`` alone. What is no placeholder in full gets no key."""
    lent, held = await lender(credential(**changed))
    name = changed.get("header", "Authorization")
    said = re.sub(
        r"(?s)\((.*)\)", lambda pair: base64.b64encode(pair[1].encode("latin-1")).decode(), said.replace("P", held)
    )
    attempt = await pass_on(lent, f"https://{API}/v1/me", headers=[(name.lower(), said)])
    assert [value for given, value in attempt.sent_headers if given == name] == [sent] * bool(sent)
    assert attempt.credential == ("tracker" if sent else None)


OWN = ("authorization", "Bearer P")
STRAYS: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("/v1/me", {}, False, False),
    ("/v1/me", {"headers": [("authorization", "Bearer ghp_" + "x" * 36)]}, False, False),
    ("/v1/me", {"headers": [OWN]}, True, False),
    ("/v1/me", {"headers": [OWN, ("accept", "P")]}, True, True),
    ("/v1/me", {"headers": [OWN], "body": b"P"}, True, True),
    ("/v1/me?q=P", {"headers": [OWN]}, True, True),
    ("/v1/me", {"headers": [OWN, ("Authorization", "Bearer x")]}, False, True),
    ("/v1/P", {}, False, True),
    ("/v2/me", {"headers": [OWN]}, False, True),
    ("/v1/me", {"headers": [("accept", "\udcff P")]}, False, True),
    ("/v1/me", {"headers": [("accept", "P")], "hop": 1}, False, False),
    ("/v1/me", {"headers": [OWN], "kind": "connect"}, False, False),
    ("/v1/me", {"headers": [OWN], "takes_key": False, "hop": 1}, False, False),
    ("/v1/me?key=P&a=1", {}, True, False),
    ("/v1/me?key=P&other=P", {}, True, True),
    ("/v1/me?key=P&key=P", {}, False, True),
    ("/v1/me?a=%50", {}, False, True),
]


@pytest.mark.parametrize("host", [API, ELSEWHERE])
@pytest.mark.parametrize(("path", "asked", "takes", "strays"), STRAYS)
async def test_a_placeholder_that_gets_no_key_strays(
    host: str, path: str, asked: dict[str, Any], takes: bool, strays: bool
) -> None:
    """Wherever it stands beside the one place of a header's or a parameter's key; nothing of another call does."""
    lent, held = await lender(credential(**{"header": None, "prefix": "", "query": "key"} if "key=" in path else {}))
    asked = asked | {"headers": [(name, said.replace("P", held)) for name, said in asked.get("headers", ())]}
    asked |= {"body": asked.get("body", b"").replace(b"P", held.encode())}
    path = path.replace("%50", "".join(f"%{ord(each):02x}" for each in held)).replace("P", held)
    attempt = await pass_on(lent, f"https://{host}{path}", **asked)
    assert attempt.credential == ("tracker" if takes and host == API else None)
    assert (attempt.sent_target is None) == (attempt.credential is None)
    assert attempt.strayed == ("tracker" if strays or (takes and host != API) else None)


MISPLACED: dict[str, tuple[str, Sequence[tuple[str, str]], bytes]] = {
    "another header": ("/v1/me", [("user-agent", "P")], b""),
    "a header beside others": ("/v1/me", [("authorization", "Bearer P"), ("authorization", "Bearer x")], b""),
    "with more behind it": ("/v1/me", [("authorization", "Bearer P, x")], b""),
    "another scheme": ("/v1/me", [("authorization", "Digest P")], b""),
    "basic with an odd user": ("/v1/me", [("authorization", basic("a b\r\nX: y", "P"))], b""),
    "a path": ("/v1/P", [], b""),
    "a query": ("/v1/me?key=P", [], b""),
    "a body": ("/v1/me", [], b"P"),
    "another path of the host": ("/v2/me", [("authorization", "Bearer P")], b""),
    "another call's": ("/v1/me", [("authorization", "Bearer " + make_placeholder(KEY))], b""),
    "nothing": ("/v1/me", [], b""),
}


@pytest.mark.parametrize(("path", "headers", "body"), MISPLACED.values(), ids=MISPLACED)
@pytest.mark.parametrize("host", [API, ELSEWHERE])
async def test_a_placeholder_anywhere_else_stays_what_it_is(
    wires: Cable, host: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
) -> None:
    """Neither server gets the key; the control is that the right place still does, in the same call."""
    lent, held = await lender()
    async with internet(wires) as net:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(b""), requests), name=API)
        await net.serve(OTHER, 443, answering(ok(b""), requests), name=ELSEWHERE)
        gate = net.gate(*RULES, lender=lent)
        said = [(name, value.replace("P", held) if "Basic" not in value else value) for name, value in headers]
        await fetch(gate, f"https://{host}{path.replace('P', held)}", method="POST" if body else "GET",
                    headers=said, body=body.replace(b"P", held.encode()))  # fmt: skip
        assert KEY.encode() not in b"".join(requests)
        await fetch(gate, f"https://{API}/v1/me", headers=[("authorization", f"Bearer {held}")])
        assert KEY.encode() in requests[-1]
    assert [each.credential for each in net.attempts][-1] == "tracker"


async def test_of_two_keys_for_a_host_the_one_is_added_whose_placeholder_was_sent(wires: Cable) -> None:
    """The order in the profile does not matter."""
    values = {"env:A": "A" + KEY, "env:B": "B" + KEY}

    async def read(source: str) -> CredentialValue:
        return CredentialValue(text=values[source])

    lent = CredentialInjector(
        credentials=[credential(name=name.lower(), source=f"env:{name}", env=f"KEY_{name}") for name in "AB"], read=read
    )
    given = await lent.prepare_environment()
    async with internet(wires) as net:
        net.zone[API] = [[SITE]]
        requests: list[bytes] = []
        await net.serve(SITE, 443, answering(ok(b""), requests), name=API)
        for name in "BA":
            said = [("authorization", f"Bearer {given[f'KEY_{name}']}")]
            await fetch(net.gate(*RULES, lender=lent), f"https://{API}/v1/me", headers=said)
            assert values[f"env:{name}"].encode() in requests[-1]


async def test_a_key_that_cannot_be_had_refuses_the_request_and_not_the_program() -> None:
    """Its placeholder is made all the same."""

    async def read(_source: str) -> CredentialValue:
        raise unusable("the variable is not set", "Set it.")

    lent = CredentialInjector(credentials=(credential(name="other", env=None), credential()), read=read)
    assert [(name, len(held)) for name, held in (await lent.prepare_environment()).items()] == [("TRACKER_TOKEN", 40)]


def test_a_placeholder_looks_like_its_key_and_holds_nothing_of_it() -> None:
    """Of one kind, of a length that tells only a class, and another each time."""
    first, second = make_placeholder(KEY), make_placeholder(KEY)
    assert first != second
    assert first.startswith("ghp_")
    assert first[4:8] != KEY[4:8]
    assert len(first) == 40
    sizes = {16: 40, 40: 40, 41: 64, 97: 128, 128: 128, 129: 256, 256: 256, 8000: 256}
    assert {size: len(make_placeholder("-" * size)) for size in sizes} == sizes
    assert make_placeholder("-" * 40).isalnum()


@pytest.mark.driver("bubblewrap")
async def test_a_placeholder_that_strays_is_an_alarm(
    wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another header, a path, a query, a body, to another host, in output, encoded; each its own call.

    The control: a call that uses it where it belongs raises none.
    """
    monkeypatch.setenv("TRACKER_SOURCE", KEY)
    begin = """
import base64, os, urllib.error, urllib.request
held = os.environ["TRACKER_TOKEN"]
def ask(url, **given):
    try:
        urllib.request.urlopen(urllib.request.Request(url, **given)).read()
    except urllib.error.HTTPError as refused:
        print(refused.code)
"""
    right = f'ask("https://{API}/v1/me", headers={{"Authorization": "Bearer " + held}})'
    strays = {
        f'ask("https://{API}/v1/me", headers={{"User-Agent": held}})': "request",
        f'ask("https://{API}/v1/" + held)': "request",
        f'ask("https://{API}/v1/me?q=" + base64.b64encode(held.encode()).decode())': "request",
        f'ask("https://{API}/v1/me", data=held.encode())': "request",
        f'ask("https://{ELSEWHERE}/v1/me", headers={{"Authorization": "Bearer " + held}})': "request",
        "print(held)": "stdout",
        "held[::-1]": "value",
    }
    rules = [f'{{ host = "{host}", methods = ["GET", "POST"] }}' for host in (API, ELSEWHERE)]
    text = profile("run_python", "bubblewrap", *rules, tls="inspect", max_connections=4) + LENT
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        net.zone |= {API: [[SITE]], ELSEWHERE: [[OTHER]]}
        await net.serve(SITE, 443, answering(ok(b"")), name=API)
        await net.serve(OTHER, 443, answering(ok(b"")), name=ELSEWHERE)
        seen = []
        for code in (right, *strays):
            called = await box.call("run_python", code=begin + code)
            assert not called.result.failed, called
            seen.append(called.fields["call_id"])
        found: dict[str, list[str]] = {each: [] for each in seen}
        for line in log_lines(tmp_path / "state" / "audit"):
            record = json.loads(line)
            # Looking like a key, it is one for the rule `secrets` as well.
            if record["kind"] == "watch.alarm" and record["data"]["rule"] != "secrets":
                alarm = record["data"]
                assert (alarm["rule"], alarm["action"], alarm["what"]) == ("placeholder", "record", "tracker")
                found[alarm["call"]].append(alarm["where"])
    assert list(found.values()) == [[], *([where] for where in strays.values())]


LENT = f"""
[[network.credential]]
name = "tracker"
host = "{API}"
paths = ["/v1/*"]
header = "Authorization"
prefix = "Bearer "
source = "env:TRACKER_SOURCE"
env = "TRACKER_TOKEN"
"""


@pytest.mark.driver("bubblewrap")
async def test_a_helper_is_started_for_a_decision_that_is_on_disk(
    wires: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a program's placeholder may start a program of the host's: the log says why before."""
    seen = tmp_path / "seen"
    helper = tmp_path / "helper"
    helper.write_text(
        f"#!/bin/sh\ngrep -c call.decided {tmp_path}/state/audit/audit.jsonl > {seen}\n"
        f"echo '{json.dumps({'value': KEY})}'\n"
    )
    helper.chmod(0o700)
    lent = LENT.replace("env:TRACKER_SOURCE", f"exec:{helper}")
    text = profile("run_python", "bubblewrap", f'{{ host = "{API}" }}') + lent
    async with internet(wires) as net, glovebox(net, tmp_path, text) as box:
        called = await box.call("run_python", code="import os\nos.environ['TRACKER_TOKEN'][:4]")
    assert called.fields["value"] == "'ghp_'"
    assert seen.read_text() == "1\n"
