"""A call's way out, as its profile grants it, with one audit record per connection."""

import hashlib
from collections.abc import Callable

from glovebox_audit.events import EgressAnswered, EgressDecided
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.session.connection import Duplex, Serve
from glovebox_server.core.call import Call
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, OnDecision
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.limits import EgressLimits
from glovebox_server.egress.serve import serve
from glovebox_server.egress.tls.authority import Authority
from glovebox_server.guards.credentials.cache import CredentialCache
from glovebox_server.guards.credentials.injector import CredentialInjector


def gate_for(
    call: Call,
    look: OnDecision,
    *,
    credentials: CredentialCache,
    made: Callable[..., EgressGate] | None = None,
) -> EgressGate:
    """Return the gate for one call, within what is reserved for it.

    Args:
        call: The call; its profile says what may be reached.
        look: Looks at each attempt that is recorded, before anything is dialled.
        credentials: Where the values of those come from that the profile lends.
        made: Makes the gate; see ``NetworkOpener.gates``.
    """
    now, request, profile, recorder = call.now, call.request, call.now.profile, call.now.records

    async def record(attempt: EgressAttempt) -> None:
        target = attempt.target
        await recorder.record(
            EgressDecided(
                call_id=request.id,
                scheme=target.scheme if target else "unreadable",
                host=target.host if target else "unreadable",
                port=target.port if target else 0,
                method=target.method if target else None,
                asked_digest=_digest(attempt),
                effect=attempt.decision.effect,
                rule=attempt.decision.rule,
                address=attempt.addresses[0] if attempt.addresses else None,
                credential=attempt.credential,
            )
        )
        await look(attempt)

    def answered(answer: EgressAnswer) -> None:
        target = answer.attempt.target
        recorder.hold(
            EgressAnswered(
                call_id=request.id,
                host=target.host if target else "unreadable",
                asked_digest=_digest(answer.attempt),
                status=answer.status,
                type=answer.type,
                bytes=answer.bytes,
                complete=answer.complete,
            )
        )

    async def count(host: str) -> Refusal | None:
        for hook in now.on_connect:
            if refusal := await hook(host):
                return refusal
        return None

    limits = EgressLimits(
        connections=min((profile.network.max_connections, *now.max_connections)),
        hops=profile.network.max_redirects,
        body_bytes=profile.network.max_bytes,
        tunnel_received_bytes=profile.network.max_bytes,
    )
    lent = profile.network.credential
    used = credentials.used((*now.rights.credentials, *lent))
    gate = (made or EgressGate)(
        rules=profile.network.allow,
        on_decision=record,
        on_answer=answered,
        on_connection=count if now.on_connect else None,
        principal=request.principal.id,
        limits=limits,
        authority=Authority(profile.network.allow) if profile.network.tls == "inspect" else None,
        lender=CredentialInjector(credentials=lent, read=credentials.value, used=used) if lent or used else None,
    )
    for hook in now.on_traffic:
        hook(gate.traffic)
    return gate


def _digest(attempt: EgressAttempt) -> str:
    return "sha256:" + hashlib.sha256(attempt.asked.encode("utf-8", "surrogatepass")).hexdigest()


def serve_with(gate: EgressGate) -> Serve:
    """What the link calls for each stream the guest opens towards the network."""

    async def served(stream: Duplex) -> None:
        await serve(gate, stream)

    return served
