"""What governs the calls of one case: the server's own parts, in a state directory and by a clock that are the case's.

So cases that are tried at one time neither spend, stop nor approve anything of each other's.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from tests.conformance.whole_calls.case import Step

from glovebox_profiles.policy.model import Policy
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.app import App
from glovebox_server.calls import ToolCall
from glovebox_server.core.rights import RightsOf
from glovebox_server.guards.admission.admission import Repeats
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import ApprovalAnswer
from glovebox_server.guards.budgets.budgets import opened as opened_budgets
from glovebox_server.guards.budgets.spending import Clocks, read_clocks
from glovebox_server.guards.registry import GuardSet
from glovebox_server.guards.stops.stops import Scope, Stops, new_stop, stops_of
from glovebox_server.guards.watch.canaries import canaries_of, new_canary
from glovebox_server.guards.watch.watch import Watch

_LATER: Final = 8 * 86400.0
"""Longer than any window, question or grant lasts."""
_OPERATOR: Final = "proof:operator"
_SECOND: Final = "proof:second-operator"


class CaseGovernance:
    """Governs the calls of one case. Make it with ``opened``."""

    def __init__(self, app: App, place: Path) -> None:
        """Take the server's parts, and an empty directory of this case alone."""
        self._app = app
        self.place = place
        """The case's state directory."""
        self._stops = stops_of(place)
        self._policy: Policy | None = None
        self._parts: GuardSet | None = None
        self._running = AsyncExitStack()
        self._ahead = 0.0
        self._clocks = read_clocks()
        # Known to the server, and in no file: a case's program puts it together.
        canary = new_canary(app.workspace.path or place, "none")
        canaries_of(place).add(canary.id, canary.model_dump_json().encode())
        self.marker = canary.marker

    @classmethod
    @asynccontextmanager
    async def opened(cls, app: App, place: Path) -> AsyncIterator[Self]:
        """What governs a case, for the length of the block."""
        case = cls(app, place)
        try:
            yield case
        finally:
            await case._running.aclose()

    async def of(self, policy: Policy | None, rights_of: RightsOf) -> GuardSet:
        """What governs its next call, under this policy: what its watch rules do is said by that of the first."""
        if self._parts is None:
            self._policy = self._policy or policy
            self._parts = await self._running.enter_async_context(self._started(self._policy))
        return replace(self._parts, rights_of=rights_of)

    @asynccontextmanager
    async def _started(self, policy: Policy | None) -> AsyncIterator[GuardSet]:
        """The parts, as a server has them after it is started."""
        audit, later = self._app.audit, self._later
        spends = policy is not None and any(role.budget or role.rate for role in policy.roles.values())
        async with AsyncExitStack() as opened:
            stops = await opened.enter_async_context(Stops.opened(self.place, audit))
            actions = policy.watch if policy else {}
            watch = await Watch.opened(self.place, audit, stops, actions)
            budgets = None
            if spends:
                budgets = await opened.enter_async_context(opened_budgets(self.place, self._shown))
            asking = Approvals.opened(self.place, audit, self._app.tools, lambda _: "", later)
            approvals = await opened.enter_async_context(asking)
            yield replace(
                self._app.guards,
                stops=stops,
                budgets=budgets,
                approvals=approvals,
                watch=watch,
                # However long the host takes over what comes between two calls, what was counted is not over.
                repeats=Repeats(lambda: self._ahead),
            )

    def _shown(self) -> Clocks:
        """What the clocks of the case show to budgets: a window never ends in the middle of a case."""
        ahead = round(self._ahead * 1000)
        return replace(self._clocks, wall=self._clocks.wall + ahead, since_boot=self._clocks.since_boot + ahead)

    def _later(self) -> Clocks:
        now, ahead = read_clocks(), round(self._ahead * 1000)
        return replace(now, wall=now.wall + ahead, since_boot=now.since_boot + ahead)

    def stop(self, scope: Scope, name: str) -> None:
        """Stop something, as an operator does."""
        stop = new_stop(scope, name, because="The case says so.", by="proof", made=datetime.now(UTC))
        self._stops.add(stop.id, stop.encoded())

    async def happens(self, step: Step, call: ToolCall, question: str) -> None:
        """Do what comes after a call.

        Args:
            step: what.
            call: the call.
            question: id of the question that it put; empty where it put none.
        """
        names: dict[Scope, str] = {
            "run": call.run or "", "principal": call.principal.id, "tool": call.tool, "all": "",
        }  # fmt: skip
        match step.split():
            case ["later"]:
                self._ahead += _LATER
            case ["restart"]:
                await self._running.aclose()
                self._parts = None
            case ["resume"]:
                for name in self._stops.names():
                    self._stops.remove(name)
            case ["stop", scope]:
                self.stop(scope, names[scope])  # type: ignore[arg-type, index]  # Step has no other
            case ["revoke"]:
                await self._approvals().withdraw(question, _OPERATOR)
            case [said, *reach]:
                by = {"own": call.principal.id, "second": _SECOND}.get("".join(reach), _OPERATOR)
                await self._answer(question, by, allow=said == "allow", reach=reach)

    async def _answer(self, question: str, by: str, *, allow: bool, reach: list[str]) -> None:
        found = await self._approvals().standing(question)
        if found is None:
            raise AssertionError(f"no question was put: {question!r}")
        digest = found.question.digest if reach != ["other"] else f"sha256:{'0' * 64}"
        with suppress(RefusedError):  # that it does not count is seen in what becomes of the next call
            await self._approvals().answer(
                question,
                ApprovalAnswer(
                    allow=allow, by=by, channel="operator", reach="run" if reach == ["run"] else "call", digest=digest
                ),
            )

    def _approvals(self) -> Approvals:
        if self._parts is None or not isinstance(self._parts.approvals, Approvals):
            raise AssertionError("nothing was called yet")
        return self._parts.approvals
