"""Opens the network that a profile grants: a gate on the host makes its connections, with a record each."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from glovebox_audit.events import EgressAnswered, EgressDecided
from glovebox_server.core.call import Call, Ran
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, EgressLimits
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.serve import serve_stream
from glovebox_server.guards.credentials.injector import CredentialInjector
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.watch.watch import Watch


async def open_network(
    credentials: CredentialCache, watch: Watch | None, gates: Callable[..., EgressGate] | None, call: Call
) -> None:
    """Serve the connections of a call's program, and report what they carried.

    ``gates`` makes the gates; None for the defaults. A proof's have a server of its own behind them.
    """
    now = call.now
    injector = make_injector(call, credentials)
    gate = make_gate(call, injector, watch=watch, make=gates)
    if injector is not None:
        if any(credential.env for credential in injector.credentials):
            await now.records.flush()  # a helper may be started for what the program finds in its place
        now.environment = await injector.prepare_environment()
        now.placeholders = injector.placeholders
    now.serve = partial(serve_stream, gate)

    async def report(ran: Ran) -> None:
        ran.usage |= {f"egress_{name}": spent for name, spent in asdict(gate.traffic).items()}
        if gate.unrecorded:
            ran.usage["egress_attempts_without_record"] = gate.unrecorded
        call.now.refused_targets = tuple(gate.unnamed)

    now.on_ran.append(report)


def make_injector(call: Call, cache: CredentialCache) -> CredentialInjector | None:
    """Return the injector and masker of a call's keys, or None."""
    credentials = call.now.profile.network.credential
    used = cache.used((*call.now.rights.credentials, *credentials))
    if not credentials and not used:
        return None
    return CredentialInjector(credentials=credentials, read=cache.value, used=used)


def make_gate(
    call: Call,
    injector: CredentialInjector | None,
    *,
    watch: Watch | None,
    make: Callable[..., EgressGate] | None = None,
) -> EgressGate:
    """Return the gate of one call, within its reservation."""
    now, request, network, recorder = call.now, call.request, call.now.profile.network, call.now.records

    async def record(attempt: EgressAttempt) -> None:
        await recorder.record(_decided(request.id, attempt))
        if watch is not None:
            await watch.connecting(request, attempt)

    def record_answer(answer: EgressAnswer) -> None:
        asked, complete = _asked(request.id, answer.attempt), answer.complete
        recorder.hold(
            EgressAnswered(**asked, status=answer.status, type=answer.type, bytes=answer.bytes, complete=complete)
        )

    authority = None
    if network.tls == "inspect":
        from glovebox_server.egress.authority import Authority  # noqa: PLC0415 - most calls never need it

        authority = Authority(network.allow)
    gate = (make or EgressGate)(
        rules=network.allow,
        on_decision=record,
        on_answer=record_answer,
        keys=injector,
        on_connect=now.on_connect,
        principal=request.principal.id,
        limits=EgressLimits(
            connections=min((network.max_connections, *now.max_connections)),
            hops=network.max_redirects,
            body_bytes=network.max_bytes,
            tunnel_received_bytes=network.max_bytes,
        ),
        authority=authority,
    )
    now.traffic = gate.traffic
    return gate


def _decided(call_id: str, attempt: EgressAttempt) -> EgressDecided:
    target = attempt.target
    return EgressDecided(
        **_asked(call_id, attempt),
        scheme=target.scheme if target else "unreadable",
        port=target.port if target else 0,
        method=target.method if target else None,
        effect=attempt.decision.effect,
        rule=attempt.decision.rule,
        address=str(attempt.addresses[0]) if attempt.addresses else None,
        credential=attempt.credential,
    )


def _asked(call_id: str, attempt: EgressAttempt) -> dict[str, Any]:
    digest = "sha256:" + hashlib.sha256(attempt.asked.encode("utf-8", "surrogatepass")).hexdigest()
    host = attempt.target.host if attempt.target else "unreadable"
    return {"call_id": call_id, "host": host, "asked_digest": digest}
