"""Watch rules around a call: they see its decision, and its raw output before anything is masked."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import Call, Show
from glovebox_server.guards.watch.look import Look
from glovebox_server.guards.watch.watch import Watch


async def slow(watch: Watch, call: Call) -> None:
    """Delay a call whose run is slowed."""
    call.delay = max(call.delay, watch.pause(call.request))


def ask(watch: Watch, call: Call) -> None:
    """Ask about a call whose run is asked about."""
    now = call.now
    asked = watch.asks(call.request) if now.decision.effect != "deny" else None
    if asked is not None:
        now.decision = replace(now.decision, effect="ask", rule=asked.rule, reason=asked.reason, hint=asked.hint)


async def look_at_decision(watch: Watch, call: Call) -> None:
    """Look at a decision that is on record; show a call the canaries of its workspace."""
    now = call.now
    await watch.decided(call.request, now.decision, now.rights.workspace)
    if now.decision.effect == "allow" and now.rights.workspace is not None:
        now.reveal += await watch.planted(now.rights.workspace)


async def observe(watch: Watch, call: Call) -> None:
    """Look through raw output for canary tokens and secrets, before anything is masked (GB-LIFE-10, GB-LIFE-11)."""
    now = call.now
    look = watch.look(now.placeholders)
    now.observers.append(_OutputWatcher(watch=watch, request=call.request, look=look))
    now.inspect_file = look.file


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputWatcher:
    watch: Watch
    request: ToolCall
    look: Look

    @property
    def is_complete(self) -> bool:
        return self.look.showed_all

    def printed(self, show: Show) -> Callable[[bytes], None]:
        return self.look.printed(show)

    async def ended(self, outcome: Outcome) -> None:
        await self.watch.ended(self.request, outcome, self.look)
