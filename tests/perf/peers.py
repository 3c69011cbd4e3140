"""Other ways to run a program that nobody trusts, for the same run. How they are got and run is in tests/comparison."""

import json
import secrets
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from tests.comparison.getting import got
from tests.comparison.systems import PYTHON, LlmSandbox, Srt, owned
from tests.comparison.systems import _Foreign as Foreign
from tests.perf.bare import CODE
from tests.perf.machine import ROOT

from glovebox_sandboxes.conformance import host
from glovebox_sandboxes.conformance.case import LIMITS

FOLDER = ROOT / ".compare"
STANDING = {"srt-library": "srt", "llm-sandbox-pool": "llm-sandbox"}
"""Those whose caller's process stays, and which system each is."""
_SRT = "namespaces of users, mounts, processes and network, a system-call filter; no limits; reads the host's files"
_DOCKER = "namespaces but of users and control groups, a system-call filter"
_HARDENED = f"{_DOCKER}, no network, limits"
ABOUT = {
    "docker-run": f"{_DOCKER}; network, no limits; new for each program",
    "sandbox-runtime": "namespaces of users, mounts, processes and network, limits; no system-call filter; reads the "
    "host's files; new for each program",
    "srt": f"{_SRT}; new for each program",
    "srt-library": f"{_SRT}; new for each program, from a process that stays",
    "llm-sandbox": f"{_HARDENED}; new for each program",
    "llm-sandbox-pool": f"{_HARDENED}; used again, with files and processes of the programs before",
    "mcp-run-python": "WebAssembly in Deno, no Linux; new for each program",
}
"""What a program found around it, by a look from inside, and whether the next one finds the same sandbox."""
KEYS = tuple(ABOUT)


class Peer:
    """One of them, ready."""

    def __init__(self, system: Foreign, planted: host.Planted, scratch: Path) -> None:
        """Take a system, and what its calls are given."""
        self.key = system.key
        self.version = f"{system.version}; {ABOUT[self.key]}"
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


class StandingPeer:
    """One of them in a process that stays."""

    def __init__(self, key: str, version: str, process: anyio.abc.Process) -> None:
        """Take the process."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.key = key
        self.version = f"{version}; {ABOUT[key]}"
        self._sends, self._receives = process.stdin, BufferedByteReceiveStream(process.stdout)

    async def send(self, job: Any) -> None:
        """Give it a line."""
        await self._sends.send(json.dumps(job).encode() + b"\n")

    async def once(self) -> float:
        """Milliseconds of one program, from the job to its result."""
        began = time.perf_counter()
        await self.send({"code": CODE, "command": shlex.join([*PYTHON, CODE])})
        result = json.loads(await self._receives.receive_until(b"\n", 1 << 20))
        spent = (time.perf_counter() - began) * 1000
        if result["stdout"] != "1\n":
            raise RuntimeError(f"{self.key}: {result}")
        return spent


@asynccontextmanager
async def ready(key: str, directory: Path, image: str) -> AsyncIterator[Peer | StandingPeer]:
    """A peer, installed where it was not."""
    scratch = owned(directory / f"peer-{key}")
    async with got(STANDING.get(key, key), FOLDER, image) as system, host.planted() as planted:
        if not isinstance(system, Foreign):
            raise TypeError(f"{key} is not run as a command")
        system.plain = True
        if key not in STANDING:
            yield Peer(system, planted, scratch)
            return
        assert isinstance(system, LlmSandbox | Srt)
        made = system.standing(scratch)
        async with await anyio.open_process(made.argv, env=made.env, cwd=scratch, stderr=None) as process:
            peer = StandingPeer(key, system.version, process)
            await peer.send(made.settings)
            yield peer
            assert process.stdin is not None
            await process.stdin.aclose()  # it ends in good order, and its containers with it
            await process.wait()
