"""A call's way out, as its profile grants it, with one audit record per connection."""

import hashlib
from collections.abc import Callable

from glovebox_profiles.model import Profile
from glovebox_sandboxes.session.connection import Duplex, Serve
from glovebox_server.audit.events import EgressAnswered, EgressDecided
from glovebox_server.calls import ToolCall
from glovebox_server.egress.credentials.held import Held
from glovebox_server.egress.credentials.lent import Lender
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, OnDecision
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.limits import EgressLimits
from glovebox_server.egress.serve import serve
from glovebox_server.egress.tls.authority import Authority
from glovebox_server.governance.governance import Reservation
from glovebox_server.receipts.recorder import CallRecorder


def gate_for(
    profile: Profile,
    recorder: CallRecorder,
    call: ToolCall,
    connecting: OnDecision | None = None,
    reservation: Reservation | None = None,
    *,
    credentials: Held,
    made: Callable[..., EgressGate] | None = None,
) -> EgressGate | None:
    """The gate for one call, within what is reserved for it; None where its profile grants no network.

    Args:
        profile: says what may be reached.
        recorder: of the call.
        call: the call.
        connecting: looks at each attempt that is recorded, before anything is dialled; None where nobody does.
        reservation: what the call may spend.
        credentials: where the values of those come from that the profile lends.
        made: makes the gate; see ``Broker.gates``.
    """
    if profile.network.mode == "none":
        return None

    async def record(attempt: EgressAttempt) -> None:
        target = attempt.target
        await recorder.record(
            EgressDecided(
                call_id=call.id,
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
        if connecting is not None:
            await connecting(attempt)

    def answered(answer: EgressAnswer) -> None:
        target = answer.attempt.target
        recorder.hold(
            EgressAnswered(
                call_id=call.id,
                host=target.host if target else "unreadable",
                asked_digest=_digest(answer.attempt),
                status=answer.status,
                type=answer.type,
                bytes=answer.bytes,
                complete=answer.complete,
            )
        )

    most, bound = profile.network.max_connections, reservation.connections if reservation else None
    limits = EgressLimits(
        connections=most if bound is None else min(most, bound),
        hops=profile.network.max_redirects,
        body_bytes=profile.network.max_bytes,
        tunnel_received_bytes=profile.network.max_bytes,
    )
    lent = profile.network.credential
    gate = (made or EgressGate)(
        rules=profile.network.allow,
        on_decision=record,
        on_answer=answered,
        on_connection=reservation.connect if reservation else None,
        principal=call.principal.id,
        limits=limits,
        authority=Authority(profile.network.allow) if profile.network.tls == "inspect" else None,
        lender=Lender(credentials=lent, read=credentials.value, used=credentials.used(lent)) if lent else None,
    )
    if reservation:
        reservation.counts(gate.traffic)
    return gate


def _digest(attempt: EgressAttempt) -> str:
    return "sha256:" + hashlib.sha256(attempt.asked.encode("utf-8", "surrogatepass")).hexdigest()


def serve_with(gate: EgressGate) -> Serve:
    """What the link calls for each stream the guest opens towards the network."""

    async def served(stream: Duplex) -> None:
        await serve(gate, stream)

    return served
