"""Watch rules around a call: two links, because they see its decision from outside and its raw output from inside."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import CallResult, Decision, ToolCall
from glovebox_server.core.call import Call, Ran, Show
from glovebox_server.core.chain import Next
from glovebox_server.core.rights import Rights
from glovebox_server.guards.watch.look import Look
from glovebox_server.guards.watch.watch import Watch


def slow(watch: Watch, call: Call, call_next: Next[CallResult]) -> Awaitable[CallResult]:
    """Delay a call whose run is slowed, ask about one whose run is asked about, and look at what is decided."""
    call.delay = max(call.delay, watch.pause(call.request))
    decide = call.decide

    def ask(rights: Rights) -> tuple[Decision, Rights]:
        decision, rights = decide(rights)
        asked = watch.asks(call.request) if decision.effect != "deny" else None
        if asked is not None:
            decision = replace(decision, effect="ask", rule=asked.rule, reason=asked.reason, hint=asked.hint)
        return decision, rights

    async def look(call: Call) -> None:
        now = call.now
        await watch.decided(call.request, now.decision, now.rights.workspace)
        if now.decision.effect == "allow" and now.rights.workspace is not None:
            now.reveal += await watch.planted(now.rights.workspace)

    async def question(call: Call) -> None:
        await watch.questioned(call.request)

    call.decide = ask
    call.on_decided.append(look)
    call.on_question.append(question)
    return call_next(call)


def observe(watch: Watch, call: Call, call_next: Next[Ran]) -> Awaitable[Ran]:
    """Look through raw output for canary tokens and secrets, before anything is masked (GB-LIFE-10, GB-LIFE-11)."""
    now = call.now
    look = watch.look(now.placeholders)
    now.observers.append(_OutputWatcher(watch=watch, request=call.request, look=look))
    now.inspect_file = look.file
    return call_next(call)


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
