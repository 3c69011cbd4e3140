"""``python -m tests.perf.attestation``: what the host's look and the receipt add to a call, by interleaved calls.

Calls with both, and calls in which the host does not look and the last record is written alone. Medians; no bound: the
noise of a shared machine is as large as what is measured.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
from rich.console import Console

from sandboxes.bwrap import BwrapSandbox
from sandboxes.outside import Outside, unseen
from server import app as apps
from server.app import App
from server.arguments import validated
from server.calls import Principal, ToolCall
from server.ids import new_call_id
from server.receipts.ledger import LastWord, Ledger, Receipt
from server.settings import Settings
from tests.brokered import Heard, profile

ROUNDS = 150
WARM_UP = 5


async def once(app: App) -> float:
    """Milliseconds of one call."""
    call = ToolCall(
        id=new_call_id(),
        principal=Principal(id="local:perf", transport="cli"),
        session=None,
        tool="run_python",
        arguments=validated(app.tools["run_python"], {"code": "1"}),
        received=datetime.now(UTC),
    )
    began = time.perf_counter()
    await app.broker.call(call, Heard())
    return (time.perf_counter() - began) * 1000


async def blind(_sandbox: BwrapSandbox) -> Outside:
    """No look at the sandbox."""
    return unseen("left out")


async def plain(ledger: Ledger, last: LastWord) -> Receipt:
    """The last record, and no receipt."""
    await ledger.append(last)
    return Receipt(uri="", digest="")


async def timed(parts: dict[str, list[float]], name: str, action: Callable[..., Any], *arguments: Any) -> Any:
    """One step of a call, its time kept."""
    began = time.perf_counter()
    done = await action(*arguments)
    parts.setdefault(name, []).append((time.perf_counter() - began) * 1000)
    return done


async def main() -> None:
    """Measure and print."""
    console = Console()
    look, close = BwrapSandbox.outside, Ledger.close
    parts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)
        (directory / "profiles").mkdir()
        (directory / "workspace").mkdir(mode=0o755)
        (directory / "profiles" / "run_python.toml").write_text(profile("run_python", "bubblewrap"))
        settings = Settings(
            workspace=directory / "workspace", profiles_dir=directory / "profiles", state_dir=directory / "state"
        )
        async with apps.opened(settings, "cli") as app:
            taken: dict[str, list[float]] = {"with": [], "without": []}
            for number in range(WARM_UP + ROUNDS):
                for name, steps in taken.items():
                    full = name == "with"

                    async def see(sandbox: BwrapSandbox, *, full: bool = full) -> Outside:
                        found: Outside = await timed(parts, f"look {name}", look if full else blind, sandbox)  # noqa: B023
                        return found

                    async def end(ledger: Ledger, last: LastWord, *, full: bool = full) -> Receipt:
                        found: Receipt = await timed(parts, f"end {name}", close if full else plain, ledger, last)  # noqa: B023
                        return found

                    with mock.patch.object(BwrapSandbox, "outside", see), mock.patch.object(Ledger, "close", end):
                        spent = await once(app)
                    if number >= WARM_UP:
                        steps.append(spent)
    for name, times in {**taken, **parts}.items():
        console.print(
            f"{name:14} p50 {statistics.median(times):6.2f} ms, p95 {statistics.quantiles(times, n=20)[-1]:6.2f}"
        )


if __name__ == "__main__":
    anyio.run(main)
