"""Opens the network that a profile grants: connections pass a gate on the host, which injects keys."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from glovebox_server.core.call import Call, Ran
from glovebox_server.core.chain import Next
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.egress.gate import EgressGate
from glovebox_server.guards.credentials.cache import CredentialCache
from glovebox_server.guards.network.gate import gate_for, serve_with
from glovebox_server.guards.watch.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOpener:
    """Opens gates for calls."""

    credentials: CredentialCache
    watch: Watch | None
    gates: Callable[..., EgressGate] | None
    """Makes the gates; None as they are. A proof's have a server of its own behind them."""

    async def open(self, call: Call, call_next: Next[Ran]) -> Ran:
        """Serve the connections of a call's program, and tell what they carried."""
        now = call.now

        async def look(attempt: EgressAttempt) -> None:
            if self.watch is not None:
                await self.watch.connecting(call.request, attempt)

        gate = gate_for(call, look, credentials=self.credentials, made=self.gates)
        if gate.lender is not None:
            if any(credential.env for credential in gate.lender.credentials):
                await now.records.flush()  # a helper may be started for what the program finds in its place
            now.environment = await gate.lender.environment()
            now.placeholders = gate.lender.placeholders
        now.serve = serve_with(gate)
        ran = await call_next(call)
        ran.usage |= {f"egress_{name}": spent for name, spent in asdict(gate.traffic).items()}
        if gate.unrecorded:
            ran.usage["egress_attempts_without_record"] = gate.unrecorded
        now.refused_targets = tuple(gate.unnamed)
        return ran
