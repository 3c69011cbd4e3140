"""F8: what a caller names as inputs does not pass through the server's memory as a whole."""

import threading
from pathlib import Path
from typing import Self

import anyio
import pytest
from tests.fixtures.brokered import submitted

from glovebox_server import app as apps
from glovebox_server.calls import CallResult, Principal
from glovebox_server.core.call import MAX_INPUT_BYTES
from glovebox_server.settings import Settings

CALLS = 6
MOST_BYTES = 64 * 1024 * 1024
"""The server may grow by this: two windows of 1 MiB and a piece for each call are about 13 MiB, and there is slack."""
WRITE = f"import os; open('/output/large.bin', 'wb').write(os.urandom({MAX_INPUT_BYTES}))"
READ = """
import hashlib
with open("/input/large.bin", "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())
"""


class Growth:
    """How much more of this process was in memory at most than at the beginning, looked at every few milliseconds."""

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._before = self._most = _resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = self._most - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.driver("bubblewrap")
async def test_six_calls_with_the_largest_input_do_not_swell_the_server(tmp_path: Path) -> None:
    """With the shipped profile, at one time: each program gets all of it; whole in memory they take more (control)."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    workspace.chmod(0o755)
    (tmp_path / "none").mkdir()
    results: list[CallResult] = []
    settings = Settings(workspace=workspace, profiles_dir=tmp_path / "none", state_dir=tmp_path / "state")
    async with apps.opened(settings, "cli") as app:
        made = await submitted(app, "run_python", {"code": WRITE})
        (large,) = made.structured["artifacts"]
        assert large["bytes"] == MAX_INPUT_BYTES

        async def call() -> None:
            results.append(await submitted(app, "run_python", {"code": READ, "inputs": [large["uri"]]}))

        await call()  # what the first one needs once is not counted
        with Growth() as growth:
            async with anyio.create_task_group() as tasks:
                for _ in range(CALLS):
                    tasks.start_soon(call)
        assert [result.structured["stdout"]["text"].strip() for result in results] == [large["sha256"]] * (CALLS + 1)
        assert growth.bytes < MOST_BYTES

        held: list[bytes] = []
        with Growth() as growth:
            for _ in range(CALLS):
                async with app.artifacts.open(large["uri"], Principal(id="local:test", transport="cli")) as reader:
                    held.append(await reader.read(MAX_INPUT_BYTES))
        assert growth.bytes > 2 * MOST_BYTES
