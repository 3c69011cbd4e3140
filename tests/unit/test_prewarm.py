"""What is prepared before the first call: the shipped profiles, a pool that only listens."""

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_sandboxes.contract.errors import UnsupportedSpec
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.pool.provider import SandboxProvider
from glovebox_server.app import check_example
from glovebox_server.broker import prewarm
from glovebox_server.governance.rights import Rights


class Host:
    """Drivers and pool in one: one driver, whose plans are their specs."""

    def __init__(self, *, usable: bool) -> None:
        self.usable = usable
        self.prepared: list[SandboxSpec] = []

    async def choose(self, _names: tuple[str, ...], spec: SandboxSpec) -> tuple[str, SandboxSpec]:
        """The driver."""
        if not self.usable:
            raise UnsupportedSpec("isolation", "none of this test's", "")
        return "driver", spec

    def prepare(self, _driver: str, plan: SandboxSpec) -> None:
        """Remember it."""
        self.prepared.append(plan)


@pytest.mark.parametrize("usable", [True, False])
async def test_those_without_modules_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, usable: bool
) -> None:
    """Of the profiles that preload, each of both kinds. Where a profile cannot be enforced, its calls hear of it."""
    host = Host(usable=usable)
    before: list[bool] = []

    async def slept(seconds: float) -> None:
        assert seconds == prewarm.IMPORTS_AFTER_SECONDS
        before.extend(bool(each.preload) for each in host.prepared)

    monkeypatch.setattr(anyio, "sleep", slept)
    profiles = load([SHIPPED], check_example=check_example)
    provider = SandboxProvider(drivers=cast("Any", host), pool=cast("Any", host))
    await prewarm.prepare_sandboxes([Rights(profiles=profiles, workspace=tmp_path)], provider)
    modules = profiles.get("run_python")
    assert modules is not None
    assert [each.preload for each in host.prepared] == ([(), modules.python.preload] if usable else [])
    assert before == ([False] if usable else [])
    assert len({each.without_preload() for each in host.prepared}) == usable


async def test_sandboxes_of_the_first_roles_are_prepared_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A role with another workspace needs another sandbox, the same one twice none; of many only the first have any."""

    async def slept(_seconds: float) -> None:
        return

    monkeypatch.setattr(anyio, "sleep", slept)
    profiles = load([SHIPPED], check_example=check_example)
    host = Host(usable=True)
    provider = SandboxProvider(drivers=cast("Any", host), pool=cast("Any", host))
    places = [tmp_path, tmp_path, *(tmp_path / str(number) for number in range(2 * prewarm.MAX_PREPARED))]
    await prewarm.prepare_sandboxes([Rights(profiles=profiles, workspace=place) for place in places], provider)
    sources = [each.mounts[0].source for each in host.prepared if each.preload]
    assert sources == [str(place) for place in places[1 : prewarm.MAX_PREPARED + 1]]
