"""Kill the worker every 500 calls and a server process every 1,000: each call has one end, and nothing is left.

``python -m tests.soak.kills --calls 10000``: one ``glovebox serve --processes 2`` whose sandboxes stand ready. Prints
what it found as JSON; exit code 1 if a call has no end or two, or anything stayed.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from tests.fixtures import leftovers
from tests.fixtures.workers import workers
from tests.soak.account import accounted
from tests.soak.soak import AT_ONCE, Soak, serving, staying

from glovebox_audit.query.calls import completed
from glovebox_audit.verify import verify
from glovebox_sandboxes.drivers.registry import NAMES
from glovebox_sandboxes.worker.answering import IDLE_SECONDS

WORKER_EVERY, SERVER_EVERY = 500, 1000


def kill(soak: Soak, what: str) -> list[int]:
    """Kill the worker, or one of the server's processes; return which."""
    found = workers(soak.state)
    if what == "server process":
        own = [each.pid for each in leftovers.family(soak.process.pid) if each.parent == soak.process.pid]
        found = [soak.chance.choice(own)]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    soak.windows.append((time.time(), time.time()))
    soak.kills[what] += 1
    return found


async def run(count: int, driver: str, directory: Path) -> dict[str, Any]:
    """All calls, and what was found afterwards."""
    killed: set[int] = set()
    (directory / "state").mkdir(mode=0o700)
    chance = random.Random(count)  # noqa: S311 - not for secrets
    async with serving(directory, driver, "warm", chance, None, "--processes", "2") as soak:
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def one(number: int) -> None:
            async with limiter:
                await soak.one(number, "none")

        for start in range(0, count, WORKER_EVERY):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + WORKER_EVERY, count)):
                    tasks.start_soon(one, number)
                await anyio.sleep(chance.uniform(0.5, 2.0))
                killed.update(kill(soak, "worker"))
                if start % SERVER_EVERY == 0:
                    await anyio.sleep(chance.uniform(0.5, 2.0))
                    killed.update(kill(soak, "server process"))
            sys.stderr.write(f"{start + WORKER_EVERY} calls, {dict(soak.kills)}\n")
        family = leftovers.family(soak.process.pid)
        soak.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            code = await anyio.to_thread.run_sync(soak.process.wait)
    with anyio.move_on_after(IDLE_SECONDS + leftovers.TIMEOUT_SECONDS):
        while workers(soak.state):  # noqa: ASYNC110 - it ends by itself
            await anyio.sleep(1)
    there = leftovers.records(soak.state)
    arrived = {each.data["arguments"]["code"].partition("\n")[0] for each in there if each.kind == "call.decided"}
    for tag, answer in soak.answers.items():  # the process died before it had the call: nothing ran
        if answer.startswith("error: ") and tag.strip() not in arrived:
            soak.answers[tag] = "left"
    account, whole = accounted(there, soak.answers, soak.windows), verify(soak.state / "audit")
    sandboxes = [completed(each.data, there)["measured"] for each in there if each.kind == "sandbox.started"]
    stayed = await staying({each["namespaces"]["pid"] for each in sandboxes if each["system"] != "gvisor"})
    groups = [group for pid in {*killed, soak.process.pid} for group in leftovers.groups(pid)]
    claims = {
        f"the server ended with {code}": code == 0,
        f"the log does not verify: {whole.problems}": whole.ok,
        f"processes: {leftovers.alive(family)}, {stayed}, {workers(soak.state)}": not (
            leftovers.alive(family) or stayed or workers(soak.state)
        ),
        f"control groups: {groups}": not groups,
    }
    problems = account.problems + [claim for claim, holds in claims.items() if not holds]
    seen = Counter(answer.partition(" ")[0] for answer in soak.answers.values())
    return {"kills": soak.kills, "answers": seen, "account": asdict(account), "problems": problems}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--driver", choices=NAMES, default="bubblewrap")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        Path(place).chmod(0o755)  # as root, sandboxes run as another user
        found = anyio.run(run, given.calls, given.driver, Path(place))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    raise SystemExit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
