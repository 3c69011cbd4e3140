"""Other ways to run a program that nobody trusts, for the same run. How they are got and run is in tests/comparison."""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.comparison.getting import got
from tests.comparison.systems import _Foreign as Foreign
from tests.comparison.systems import owned
from tests.perf.bare import CODE
from tests.perf.machine import ROOT

from glovebox_sandboxes.conformance import host
from glovebox_sandboxes.conformance.case import LIMITS

FOLDER = ROOT / ".compare"
KEYS = ("docker-run", "sandbox-runtime", "llm-sandbox", "mcp-run-python")


class Peer:
    """One of them, ready."""

    def __init__(self, system: Foreign, planted: host.Planted, scratch: Path) -> None:
        """Take a system, and what its calls are given."""
        self.key = system.key
        self.version = system.version
        self._system = system
        self._planted = planted
        self._scratch = scratch

    async def once(self) -> float:
        """Milliseconds of one program, from its caller's call to the caller's end of it."""
        name = f"gbx{secrets.token_hex(5)}"
        began = time.perf_counter()
        ran = await self._system.ran(CODE, LIMITS, self._planted, scratch=self._scratch, name=name)
        spent = (time.perf_counter() - began) * 1000
        if ran.ended != "ended":
            await self._system.clean(name)
        seen = self._system.read(ran)
        if "1" not in seen.stdout.split():
            raise RuntimeError(f"{self._system.title}: {seen.ended}, {seen.note} {seen.stderr[-200:]}")
        return spent


@asynccontextmanager
async def ready(key: str, directory: Path, image: str) -> AsyncIterator[Peer]:
    """A peer, installed where it was not."""
    scratch = owned(directory / f"peer-{key}")
    async with got(key, FOLDER, image) as system, host.planted() as planted:
        if not isinstance(system, Foreign):
            raise TypeError(f"{key} is not run as a command")
        yield Peer(system, planted, scratch)
