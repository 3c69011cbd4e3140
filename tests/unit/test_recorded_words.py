"""What a call asked for is in the record by host, port and digest: a URL often is a secret, or carries one."""

import hashlib
from dataclasses import replace
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fixtures import receipts
from tests.fixtures.guest_streams import GuestStream

from glovebox_audit.chain import draft
from glovebox_audit.event import CallEvent
from glovebox_audit.events import EgressAnswered, EgressDecided
from glovebox_profiles.egress.rules import EgressDecision, EgressRule
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import Credential, Network, Profile
from glovebox_server.app import check_example
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import decide
from glovebox_server.egress.events import EgressAnswer, EgressAttempt
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.request import request
from glovebox_server.egress.serve import connect, serve_stream
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.journal import journal
from glovebox_server.guards.network.guard import make_gate, make_injector, open_network
from glovebox_server.tools import TOOLS

SECRET = "s3cret-k3y"  # noqa: S105 - nobody's
#: With the host as it is recorded.
URLS = {
    f"https://hooks.example/services/{SECRET}": "hooks.example",
    f"https://docs.example/private/{SECRET}": "docs.example",
    f"https://docs.example/a/..%3b/{SECRET}": "docs.example",
    f"https://docs.example/a/../{SECRET}": "unreadable",
    f"https://hooks.example/?token={SECRET}": "hooks.example",
    f"https://hooks.example/#{SECRET}": "hooks.example",
    f"https://user:{SECRET}@docs.example/": "unreadable",
    f"https://{SECRET}@docs.example/": "unreadable",
    f"https://docs.example:{SECRET}/": "unreadable",
    f"https:/{SECRET}": "unreadable",
    f"{SECRET}://docs.example/": "unreadable",
    f"https://docs.example/{SECRET} x": "unreadable",
    f"https://docs.example/{SECRET}%zz": "unreadable",
    f"https://docs.example\\{SECRET}/": "unreadable",
    f"http://docs.example/{SECRET}": "docs.example",
}
AUTHORITIES = (f"user:{SECRET}@docs.example:443", f"docs.example:{SECRET}", f"docs.example/{SECRET}", SECRET)


def narrow() -> Profile:
    """``fetch_url`` with one folder of one host."""
    found = load([SHIPPED], check_example=check_example).get("fetch_url")
    assert found is not None
    rule = EgressRule(host="docs.example", paths=frozenset({"/a/*"}))
    return found.model_copy(update={"network": Network(mode="egress", allow=(rule,))})


def call_of(url: str) -> ToolCall:
    """A call that fetches it."""
    return replace(receipts.call_of("c_1"), tool="fetch_url", arguments={"url": url, "method": "GET", "max_chars": 100})


@pytest.mark.parametrize("url", URLS)
def test_the_record_of_a_refusal_repeats_no_part_of_a_url_but_its_host(url: str) -> None:
    """The caller's sentence may, and that is the control: it is shown to nobody who does not know it."""
    call = call_of(url)
    decision = decide(TOOLS["fetch_url"], call.arguments, narrow())
    assert (decision.effect, decision.rule) == ("deny", "network.allow")
    event = journal.decided(call, decision, keep_arguments=False)
    assert SECRET.encode() not in draft(event).encoded
    host = URLS[url]
    assert ("an address that cannot be read" if host == "unreadable" else f"{host} port ") in event.reason
    assert "(egress." in event.reason
    if "/private/" in url:
        assert SECRET in decision.reason


def test_what_was_decided_in_other_words_is_recorded_as_it_was_told() -> None:
    """Rules that do not look at a URL repeat nothing of one."""
    call = call_of("https://docs.example/a/b")
    closed = narrow().model_copy(update={"network": Network()})
    for profile in (closed, narrow()):
        decision = decide(TOOLS["fetch_url"], call.arguments, profile)
        assert journal.decided(call, decision, keep_arguments=False).reason == decision.reason


class Recorder:
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.events: list[CallEvent] = []
        self.flushes = 0

    def hold(self, event: CallEvent) -> None:
        """Keep one."""
        self.events.append(event)

    async def flush(self) -> None:
        """Count it."""
        self.flushes += 1

    async def record(self, event: CallEvent) -> None:
        """Keep one."""
        self.events.append(event)


def under_way(profile: Profile, recorder: Any) -> Any:
    """A call that runs."""
    now = SimpleNamespace(rights=SimpleNamespace(credentials=()), on_connect=[], max_connections=[9], on_ran=[])
    now.profile, now.records = profile, recorder
    return SimpleNamespace(now=now, request=call_of(""))


async def asked(what: str, *, tunnel: bool) -> dict[str, Any]:
    """The record of one attempt of a program's, which is refused."""
    recorder: Any = Recorder()
    call = under_way(narrow(), recorder)
    gate = make_gate(call, make_injector(call, CredentialCache(recorder)), watch=None)
    if tunnel:
        await connect(gate, what, GuestStream())
    else:
        await request(gate, "GET", what, stream=GuestStream())
    (event,) = recorder.events
    item = draft(event)
    assert SECRET.encode() not in item.encoded
    return dict(item.data)


@pytest.mark.parametrize("what", [*URLS, *AUTHORITIES])
async def test_a_programs_request_or_tunnel_is_recorded_by_host_and_digest(what: str) -> None:
    """What was asked can be told from the digest by whoever knows it, and from nothing else."""
    found = await asked(what, tunnel=what in AUTHORITIES)
    assert (found["effect"], found["host"]) == ("deny", URLS.get(what, "unreadable"))
    assert what in URLS or found["port"] == 0
    assert found["asked_digest"] == "sha256:" + hashlib.sha256(what.encode()).hexdigest()


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_calls_gate_is_as_its_profile_says_and_both_ends_of_a_connection_are_recorded(keyed: bool) -> None:
    """And its traffic is reported with the call. With a key, what is held is on disk before the key is looked at."""
    key = Credential(name="k", host="docs.example", paths=("/a/*",), header="Key", env="TOKEN", source="env:NO_SUCH")
    network = narrow().network.model_copy(update={"max_connections": 12, "max_redirects": 2, "max_bytes": 77})
    network = network.model_copy(update={"tls": "inspect", "credential": (key,)}) if keyed else network
    recorder, gates, watched = Recorder(), list[EgressGate](), list[object]()

    def gate(**given: Any) -> EgressGate:
        gates.append(EgressGate(**given, unrecorded=3 * keyed, unnamed={parse_url("GET", "https://other.example/")}))
        return gates[0]

    async def connecting(*what: object) -> None:
        watched.extend(what)

    call = under_way(narrow().model_copy(update={"network": network}), recorder)
    watch: Any = SimpleNamespace(connecting=connecting) if keyed else None
    await open_network(CredentialCache(cast("Any", recorder)), watch, gate, call)
    (made,), now, limits = gates, call.now, gates[0].limits
    assert (now.serve.func, now.serve.args) == (serve_stream, (made,))
    assert (made.rules, made.principal, made.on_connect) == (network.allow, "local:1", now.on_connect)
    assert (limits.connections, limits.hops, limits.body_bytes, limits.tunnel_received_bytes) == (9, 2, 77, 77)
    assert (made.authority is not None, made.keys is not None, recorder.flushes) == (keyed, keyed, int(keyed))
    if keyed:
        assert now.environment == {"TOKEN": now.placeholders["k"]}
    url = "https://docs.example/a/\udc80"
    decision = EgressDecision(effect="allow", rule="docs", reason="", hint="")
    target = parse_url("GET", "https://docs.example:8443/a/b")
    attempt = EgressAttempt(kind="request", asked=url, decision=decision, target=target, credential="k")
    attempt.addresses = (ip_address("192.0.2.1"), ip_address("192.0.2.2"))
    await made.on_decision(attempt)
    made.on_answer(EgressAnswer(attempt=attempt, status=201, type="text/plain", bytes=5, complete=False))
    digest = "sha256:" + hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
    asked: Any = {"call_id": "c_1", "host": "docs.example", "asked_digest": digest}
    server: Any = {"scheme": "https", "port": 8443, "method": "GET", "address": "192.0.2.1", "credential": "k"}
    assert recorder.events == [
        EgressDecided(**asked, **server, effect="allow", rule="docs"),
        EgressAnswered(**asked, status=201, type="text/plain", bytes=5, complete=False),
    ]
    assert watched == ([call.request, attempt] if keyed else [])
    now.traffic.sent_bytes = 4
    ran: Any = SimpleNamespace(usage={"wall": 1})
    await now.on_ran[0](ran)
    sums = {"wall": 1, "egress_connections": 0, "egress_sent_bytes": 4, "egress_received_bytes": 0}
    assert ran.usage == sums | ({"egress_attempts_without_record": 3} if keyed else {})
    assert now.refused_targets == (parse_url("GET", "https://other.example/"),)
