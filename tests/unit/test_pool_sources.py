"""A queue whose source was replaced while sandboxes of it were being prepared."""

from pathlib import Path

import anyio
from tests.fixtures.pools import Fake, a_scene, jumping
from tests.unit.test_pool import mounted


async def steps(count: int) -> None:
    """Turns of the event loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@jumping
async def test_a_call_does_not_wait_for_what_is_prepared_of_a_replaced_workspace(tmp_path: Path) -> None:
    """Those are for nobody: others are prepared beside them."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    driver = Fake(quick=True, steps=200)
    async with a_scene(driver, mounted(workspace)) as scene:
        queue = scene.pool.prepare(driver, scene.plan)
        queue.peak = 5
        await steps(60)
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        queue._changed.set()
        await steps(20)
        scene.pool.prepare(driver, scene.plan)
        await steps(20)
        before = anyio.current_time()
        async with scene.take() as sandbox:
            assert sandbox.how == "prepared"
            assert anyio.current_time() - before < 1
