"""What was in a container ends with it, also where the Engine cannot do it any more."""

from typing import Any

import pytest

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import driver, usage
from glovebox_sandboxes.drivers.docker.driver import Remover


class Engine:
    """One that removes, or one that is gone."""

    def __init__(self, *, gone: bool) -> None:
        self.gone = gone
        self.asked: list[str] = []

    async def remove(self, name: str) -> None:
        """Remove it."""
        self.asked.append(name)
        if self.gone:
            raise SandboxError("Removing a container", "Connection refused", "Start it.")


async def test_a_removal_that_nobody_foresaw_ends_nothing_else() -> None:
    """It is told as one that failed; the containers after it are removed (the control)."""

    class Odd(Engine):
        async def remove(self, name: str) -> None:
            await super().remove(name)
            if name == "glovebox-1":
                raise KeyError("what a library did not expect")

    engine: Any = Odd(gone=False)
    remover = Remover(engine)
    async with remover.running():
        remover.take("glovebox-1", "")
        remover.take("glovebox-2", "")
    assert engine.asked == ["glovebox-1", "glovebox-2"]
    assert list(remover.leaked) == ["glovebox-1"]


@pytest.mark.parametrize("gone", [False, True])
async def test_what_the_engine_left_in_a_container_is_killed(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the Engine had its chance, whether or not it took it; a container that was never made has nothing in it."""
    ended: list[str] = []

    def end(container: str) -> int:
        ended.append(container)
        return 1

    monkeypatch.setattr(usage, "end", end)
    monkeypatch.setattr(driver, "_RETRY_SECONDS", 0)
    engine: Any = Engine(gone=gone)
    remover = Remover(engine)
    async with remover.running():
        remover.take("glovebox-1", "c0ffee")
        remover.take("glovebox-2", "")
    assert ended == ["c0ffee"]
    assert {name for name in engine.asked if name} == {"glovebox-1", "glovebox-2"}
    assert set(remover.leaked) == ({"glovebox-1", "glovebox-2"} if gone else set())
