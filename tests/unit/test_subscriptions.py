"""``resources/subscribe`` of many principals at once: each has a share of its own."""

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from glovebox_server.calls import Principal
from glovebox_server.mcp.resources import MAX_SUBSCRIPTIONS, Resources, Watches

ALICE, BOB = (Principal(id=f"token:{name}", transport="http") for name in ("alice", "bob"))


def uri(number: int) -> str:
    """Return the address of some call."""
    return f"audit://calls/c_{number:026d}"


async def test_a_flood_of_subscriptions_ends_only_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP all principals' subscriptions live together; who asks for too many loses his own oldest."""

    async def watch(_self: Resources, *arguments: Any) -> None:
        with arguments[-1]:
            await anyio.sleep_forever()

    monkeypatch.setattr(Resources, "_watch", watch)
    monkeypatch.setattr(Resources, "_running", lambda *_: "c")
    resources = Resources(cast("Any", None), anyio.Event())
    async with anyio.create_task_group() as tasks:
        watches = Watches(tasks)
        ctx = cast("Any", SimpleNamespace(lifespan_context=watches))
        await resources.subscribe(ctx, ALICE, "a", uri(0))
        for number in range(MAX_SUBSCRIPTIONS + 1):
            await resources.subscribe(ctx, BOB, f"b{number % 2}", uri(number))
        assert (ALICE.id, "a", uri(0)) in watches.scopes
        assert not watches.scopes[ALICE.id, "a", uri(0)].cancel_called
        assert (BOB.id, "b0", uri(0)) not in watches.scopes
        assert len(watches.scopes) == 1 + MAX_SUBSCRIPTIONS
        tasks.cancel_scope.cancel()


async def test_nobody_subscribes_to_what_will_not_change() -> None:
    """A call that is over, another's or none: refused, where it was promised and never sent."""
    under_way = {uri(1).removeprefix("audit://calls/"): ALICE.id}
    stores = cast("Any", SimpleNamespace(audit=SimpleNamespace(owner_of=under_way.get)))
    resources = Resources(stores, anyio.Event())
    async with anyio.create_task_group() as tasks:
        ctx = cast("Any", SimpleNamespace(lifespan_context=Watches(tasks)))
        for principal, address in ((ALICE, uri(2)), (BOB, uri(1))):
            with pytest.raises(MCPError, match="You have no such running call"):
                await resources.subscribe(ctx, principal, None, address)
        assert resources._running(ALICE, uri(1))  # the control
        tasks.cancel_scope.cancel()
