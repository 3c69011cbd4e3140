"""``make soak``: thousands of calls on one real server, most of them disturbed, and nothing of them left at the end.

One ``glovebox serve`` over HTTP with its state on a small file system of its own. Which call meets which fault is drawn
from a seed. Usage: ``python -m tests.soak.soak --calls 1000 --driver bubblewrap``; prints what it found as JSON; exit
code 1 if anything was left, lost, recorded twice, or grew.
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess  # noqa: TID251 - a whole server process is what is tested
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.fixtures import leftovers
from tests.fixtures.brokered import profile
from tests.fixtures.callers import give_token
from tests.soak.account import Account, accounted
from tests.soak.engine import OwnEngine, own_engine

from glovebox_audit.query.calls import completed
from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.engine import Engine, host_from_environment
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_sandboxes.worker.queue import MOST_READY

ROOT = Path(__file__).parents[2]
BATCH = 50  # calls between two looks at an idle server
AT_ONCE = 6  # calls under way unless said otherwise: enough to overlap, few enough for two processors
ZYGOTE_SHARE = 0.05
"""Of the kills where sandboxes are forked: it is started anew, but not at once, and calls get cold ones meanwhile."""
STATE_MIB = 64  # the state's file system before the log's own growth of at most RECORD_KIB for each call
RECORD_KIB = 40
FULL_SECONDS = 0.4  # how long the disk is full, in some batches: several calls begin or end in it
FULL_EVERY = 4  # batches. On a full disk calls fail at once, so more of it would leave little for the other faults.
ENGINE_EVERY = 4
"""Batches, between those with a full disk: with Docker its Engine is killed in these, and started again."""
MAX_SLOPE_KIB = 4.0
"""Growth of the server's resident memory for each call, over the second half of the run: in the first, whatever happens
at once for the first time (six floods, a dozen failed calls) makes the heap larger for good."""
MIN_SAMPLES = 10  # with fewer looks at the server a slope says nothing and is not judged
MAX_TOLD = 6000  # characters of the server's log in the report
#: Out of a hundred calls. The rest is left alone.
FAULTS = {"gone": 10, "cancelled": 10, "killed guest": 10, "killed sandbox": 10, "slow reader": 8, "denied": 4}
HEADERS = {
    "Accept": "application/json, text/event-stream",
    "Mcp-Protocol-Version": "2026-07-28",
    "Mcp-Method": "tools/call",
    "Mcp-Name": "run_python",
}
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
SHORT = "open('/output/a.txt', 'w').write('kept')\nprint('hi')"
LONG = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(3)"
FLOOD = "print('x' * 60_000)"


@dataclass(slots=True)
class Sample:
    """An idle server after so many calls."""

    calls: int
    rss_kib: int
    descriptors: int
    children: int
    groups: int
    containers: int
    temporary: int


@dataclass(slots=True)
class Report:
    """What a run found."""

    driver: str
    start: str
    calls: int
    seed: int
    at_once: int = AT_ONCE
    seconds: float = 0.0
    drawn: dict[str, int] = field(default_factory=dict)
    full_disks: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    forked: int = 0  # sandboxes that were forked from a zygote, of those that calls got
    account: Account | None = None
    rss_kib_warm_last: tuple[int, int] = (0, 0)
    rss_slope_kib_per_call: float = 0.0
    descriptors_warm_last: tuple[int, int] = (0, 0)
    forgotten_by_engines: int = 0
    """Containerd's own processes of containers that were starting when their Engine was killed; none of ours."""
    chain_records: int = 0
    chain_gaps: int = 0
    kernel: str = platform.release()
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Soak:
    """One run against one server."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    state: Path
    temporary: Path
    driver: str
    start: str
    chance: random.Random
    legacy: Client
    http: httpx2.AsyncClient
    engine: OwnEngine | None
    answers: dict[str, str] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    windows: list[tuple[float, float]] = field(default_factory=list)
    at_once: int = AT_ONCE
    family: set[leftovers.Process] = field(default_factory=set)

    async def one(self, number: int, fault: str) -> None:
        """One call and its fault; keeps in one word how it looked to the caller."""
        tag = f"number = {number}\n"  # a comment would be the same failing call again
        try:
            with anyio.fail_after(90):
                self.answers[tag] = await self._meet(tag, fault)
        except Exception as problem:  # noqa: BLE001 - how a broken connection looks is the client library's affair
            self.answers[tag] = f"error: {type(problem).__name__}: {str(problem)[:100]}"

    async def _meet(self, tag: str, fault: str) -> str:
        delay = self.chance.uniform(0.0, 0.6)
        match fault:
            case "cancelled" | "gone":
                answer = "left"
                with anyio.move_on_after(delay):
                    answer = await (self._told(tag + LONG) if fault == "cancelled" else self._post(tag + LONG))
            case "slow reader":
                answer = await self._post(tag + FLOOD, pause=delay)
            case "denied":
                answer = await self._post(tag + SHORT, timeout_seconds=31)
            case "killed guest" | "killed sandbox":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._kill, fault, delay)
                    answer = await self._post(tag + LONG)
                    tasks.cancel_scope.cancel()
            case _:
                answer = await self._post(tag + SHORT)
        return answer

    async def _told(self, code: str) -> str:
        """Through the SDK's client, which tells the server when it gives up."""
        return str((await self.legacy.call_tool("run_python", {"code": code})).content)

    async def _post(self, code: str, pause: float = 0.0, **more: Any) -> str:
        params = {"name": "run_python", "arguments": {"code": code, **more}, "_meta": META}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        async with self.http.stream("POST", f"{self.url}/mcp", json=body, headers=HEADERS) as response:
            await anyio.sleep(pause)
            text = (await response.aread()).decode()
        return f"{response.status_code} {text[-4000:]}"

    async def _kill(self, fault: str, delay: float) -> None:
        """Kill one of the sandboxes, whichever call it is of; try until there is one."""
        await anyio.sleep(delay)
        kills = {"docker": self._kill_in_docker, "gvisor": self._kill_in_gvisor}
        kill = kills.get(self.driver, self._kill_in_bubblewrap)
        while not await anyio.to_thread.run_sync(kill, fault):  # noqa: ASYNC110 - nobody announces sandboxes
            await anyio.sleep(0.05)
        self.kills[fault] += 1

    def _kill_in_bubblewrap(self, fault: str) -> bool:
        family = leftovers.family(self.process.pid)
        self.family.update(family)
        outer = {each.pid for each in family if each.name == "bwrap"}
        first = {each.pid for each in family if each.parent in outer} - outer
        # What a zygote has forked, and what that has; seldom the zygote itself, with which all of them end.
        forked = {each.pid for each in family if each.parent in first}
        forked |= {each.pid for each in family if each.parent in forked}
        if self.start == "warm" and forked and self.chance.random() > ZYGOTE_SHARE:
            outer = first = forked
        victims = sorted(outer if fault == "killed sandbox" else first)
        with suppress(ProcessLookupError):
            for pid in self.chance.sample(victims, min(1, len(victims))):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _kill_in_gvisor(self, fault: str) -> bool:
        """Under gVisor the guest is no process of the host's: its kernel is."""
        family = leftovers.family(self.process.pid)
        self.family.update(family)
        victims = [each.pid for each in family if each.name == "bwrap"]
        if fault == "killed guest":
            with suppress(OSError):
                victims = [each.pid for each in family if _command(each.pid).startswith(b"runsc-sandbox")]
        with suppress(ProcessLookupError):
            for pid in self.chance.sample(victims, min(1, len(victims))):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _kill_in_docker(self, fault: str) -> bool:
        try:
            engine = Engine(host_from_environment())
        except SandboxError:  # killed, too
            return False
        try:
            for name in leftovers.containers(self.process.pid):
                with suppress(Exception):  # it may not run yet, or have just ended
                    if fault == "killed sandbox":
                        engine.api.kill(name)
                        return True
                    pid: int = engine.api.inspect_container(name)["State"]["Pid"]
                    if pid:
                        os.kill(pid, signal.SIGKILL)
                        return True
        finally:
            engine.close()
        return False

    async def kill_engine(self, engine: OwnEngine) -> None:
        """Kill Docker's Engine under its calls, and start it again."""
        await anyio.sleep(self.chance.uniform(0.1, 1.0))
        await engine.killed_and_started()
        self.kills["engine"] += 1

    async def fill_disk(self) -> None:
        """Leave nothing free where the state is, for a moment."""
        await anyio.sleep(self.chance.uniform(0.1, 1.0))
        began = time.time()
        ballast = self.state / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for piece in (bytes(1 << 20), bytes(1 << 12)):
                with suppress(OSError):
                    while file.write(piece) == len(piece):
                        pass
        await anyio.sleep(FULL_SECONDS)
        ballast.unlink()
        self.windows.append((began, time.time()))

    def sample(self, calls: int) -> Sample:
        """Look at the server now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        pid = self.process.pid
        return Sample(
            calls=calls,
            rss_kib=int(found[1]),
            descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            children=len(leftovers.family(pid)),
            groups=sum(len(list(Path(each).glob("*/"))) for each in leftovers.groups(pid)),
            containers=len(leftovers.containers(pid)) if self.driver == "docker" else 0,
            temporary=len(list(self.temporary.iterdir())),
        )

    async def idle(self, calls: int) -> Sample:
        """Look until there is no more than what waits, or for as long as a test is patient."""
        with anyio.move_on_after(leftovers.TIMEOUT_SECONDS):
            while True:
                now = self.sample(calls)
                if self.at_rest(now):
                    return now
                await anyio.sleep(0.1)
        return self.sample(calls)

    def at_rest(self, now: Sample) -> bool:
        """Whether only the janitor is there, and where sandboxes are prepared ahead as many as may wait."""
        if self.start == "cold":
            return (now.children, now.groups, now.containers) == (1, 0, 0)
        # Each has two processes and up to three groups, and so has what they are forked from.
        most = MOST_READY + 1
        return now.children <= 1 + 2 * most and now.groups <= 3 * most and now.containers <= most


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[None]:
    """A file system of its own for the state; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@asynccontextmanager
async def serving(
    directory: Path, driver: str, start: str, chance: random.Random, engine: OwnEngine | None, *more: str
) -> AsyncIterator[Soak]:
    """A server with one driver and ``more`` arguments, and the clients of it."""
    places = {name: directory / name for name in ("profiles", "workspace", "state", "temporary")}
    for each in places.values():
        each.mkdir(exist_ok=True, mode=0o755)
    text = profile("run_python", driver).replace(
        "[limits]", '[audit]\nkeep = ["arguments"]\n[files]\noutput = true\n[limits]'
    )
    (places["profiles"] / "run_python.toml").write_text(f'{text}\n[python]\nstart = "{start}"\n')
    log = directory / "log"
    token = give_token(places["state"])
    command = [sys.executable, "-m", "glovebox_server", "serve", "--transport", "http", "--port", "0"]
    command += ["--processes", "1"]
    command += ["--profiles-dir", str(places["profiles"]), "--workspace", str(places["workspace"])]
    command += ["--state-dir", str(places["state"]), *more]
    environment = {**os.environ, "TMPDIR": str(places["temporary"])}
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once, and nothing else runs yet
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=sink, env=environment
        )
    try:
        await leftovers.until(lambda: re.search(rb"url=(\S+)", log.read_bytes()) is not None, 60)
        found = re.search(r"url=(\S+)", log.read_text())
        assert found is not None
        headers = {"Authorization": f"Bearer {token}"}
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=90) as old,
            httpx2.AsyncClient(headers=headers, timeout=90, limits=limits) as http,
            Client(streamable_http_client(f"{found[1]}/mcp", http_client=old), mode="legacy") as legacy,
        ):
            yield Soak(
                process=process, url=found[1], token=token, state=places["state"], temporary=places["temporary"],
                driver=driver, start=start, chance=chance, legacy=legacy, http=http, engine=engine,
            )  # fmt: skip
    finally:
        process.kill()
        process.wait()


async def calls(soak: Soak, report: Report) -> list[Sample]:
    """All calls, batch by batch; a look at the idle server after each."""
    names, weights = list(FAULTS), list(FAULTS.values())
    drawn = soak.chance.choices(["none", *names], [100 - sum(weights), *weights], k=report.calls)
    report.drawn = dict(Counter(drawn))
    report.at_once = soak.at_once
    # What is made at the first call (the janitor, threads) is no leak.
    await soak.one(-1, "none")
    samples = [await soak.idle(0)]
    for start in range(0, report.calls, BATCH):
        limiter = anyio.CapacityLimiter(soak.at_once)

        async def held(number: int, limiter: anyio.CapacityLimiter = limiter) -> None:
            async with limiter:
                await soak.one(number, drawn[number])

        async with anyio.create_task_group() as tasks:
            if start // BATCH % FULL_EVERY == 0:
                tasks.start_soon(soak.fill_disk)
            if soak.engine is not None and start // BATCH % ENGINE_EVERY == ENGINE_EVERY // 2:
                tasks.start_soon(soak.kill_engine, soak.engine)
            for number in range(start, min(start + BATCH, report.calls)):
                tasks.start_soon(held, number)
        samples.append(await soak.idle(min(start + BATCH, report.calls)))
        sys.stderr.write(f"{samples[-1]}\n")
    return samples


async def run(  # noqa: PLR0917 - what the command line says
    driver: str, start: str, count: int, at_once: int, seed: int, directory: Path, engine: OwnEngine | None
) -> Report:
    """One server, ``count`` calls; the report."""
    report = Report(driver=driver, start=start, calls=count, seed=seed)
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    began, mounts = time.monotonic(), leftovers.mounts()
    state = directory / "state"
    state.mkdir()
    with small_disk(state, STATE_MIB + count * RECORD_KIB // 1024):
        inside = leftovers.mounts()
        async with serving(directory, driver, start, chance, engine) as soak:
            soak.at_once = at_once
            samples = await calls(soak, report)
            family = {*soak.family, *leftovers.family(soak.process.pid)}
            soak.process.send_signal(signal.SIGTERM)
            with anyio.fail_after(60):
                code = await anyio.to_thread.run_sync(soak.process.wait)
            pid = soak.process.pid
        warm, last = samples[1], samples[-1]
        said = (directory / "log").read_text(errors="replace")
        unforeseen = [
            said[each.start() : each.start() + MAX_TOLD]
            for each in re.finditer("a call failed with an unexpected error", said)
        ]
        report.full_disks, report.kills = len(soak.windows), dict(soak.kills)
        report.account = accounted(leftovers.records(state, pid), soak.answers, soak.windows)
        report.rss_kib_warm_last = (warm.rss_kib, last.rss_kib)
        report.descriptors_warm_last = (warm.descriptors, last.descriptors)
        later = samples[len(samples) // 2 :]
        if len(later) >= MIN_SAMPLES:
            slope = statistics.linear_regression([each.calls for each in later], [each.rss_kib for each in later]).slope
            report.rss_slope_kib_per_call = round(slope, 2)
        whole = verify(state / "audit")
        report.chain_records, report.chain_gaps = whole.records, whole.gaps
        there = leftovers.records(state, pid)
        started = [completed(each.data, there) for each in there if each.kind == "sandbox.started"]
        # Under gVisor they are those of its own kernel; its processes are all in the family.
        measured = [each["measured"] for each in started]
        report.forked = sum(
            any(row["field"] == "namespaces shared with its zygote" for row in each["fields"]) for each in started
        )
        stayed = await staying({each["namespaces"]["pid"] for each in measured if each["system"] != "gvisor"})
        claims = {
            f"the server ended with {code}": code == 0,
            f"the log does not verify: {whole.problems}": whole.ok,
            f"the server's log tells of {len(unforeseen)} errors that nobody foresaw: {unforeseen[:1]}": not unforeseen,
            "memory grows": report.rss_slope_kib_per_call <= MAX_SLOPE_KIB,
            # Connections to an Engine are kept: as many as calls were ever under way.
            # So are those to sandboxes that wait, three for each.
            f"descriptors: {warm.descriptors} became {last.descriptors}": last.descriptors
            <= warm.descriptors + (2 if start == "cold" else 3 * MOST_READY),
            f"left while idle: {last}": soak.at_rest(last),
            f"processes: {leftovers.alive(family)}": not leftovers.alive(family),
            f"processes in a sandbox: {stayed}": not stayed,
            f"control groups: {leftovers.groups(pid)}": not leftovers.groups(pid),
            f"containers: {leftovers.containers(pid)}": not leftovers.containers(pid),
            "mounts": leftovers.mounts() == inside,
            f"temporary files: {list(soak.temporary.iterdir())[:5]}": not list(soak.temporary.iterdir()),
        }
        report.problems = [claim for claim, holds in claims.items() if not holds] + report.account.problems
    if leftovers.mounts() != mounts:
        report.problems.append("mounts after the run")
    report.seconds = round(time.monotonic() - began, 1)
    return report


async def staying(namespaces: set[int]) -> set[str]:
    """Processes that stay in one of these pid namespaces, whose numbers are used again, also for others' sandboxes."""
    stayed = inhabited(namespaces)
    with anyio.move_on_after(leftovers.TIMEOUT_SECONDS):
        while stayed:
            await anyio.sleep(0.5)
            stayed &= inhabited(namespaces)
    return stayed


def inhabited(namespaces: set[int]) -> set[str]:
    """Processes in one of these pid namespaces."""
    wanted = {f"pid:[{each}]" for each in namespaces} - {str(Path("/proc/self/ns/pid").readlink())}
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and str((process / "ns/pid").readlink()) in wanted:
                found.add(process.name)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--driver", choices=NAMES, default="bubblewrap")
    parser.add_argument(
        "--start", choices=["cold", "warm"], default="cold", help="whether sandboxes are prepared ahead"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="calls under way")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if os.geteuid() != 0:
        parser.exit(2, "The state's small file system needs root to be mounted.\n")
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        directory = Path(place)
        directory.chmod(0o755)  # as root, sandboxes run as another user
        with own_engine(directory / "engine") if given.driver == "docker" else nullcontext() as engine:
            report = anyio.run(
                run, given.driver, given.start, given.calls, given.at_once, given.seed, directory, engine
            )
        if engine is not None:
            report.forgotten_by_engines, left = engine.left()
            report.problems += [f"of the Docker Engine: {each}" for each in left[:5]]
    sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")
    raise SystemExit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
