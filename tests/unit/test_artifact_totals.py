"""Totals of artifacts: what still fits is known in the same steps whatever is kept, and is right whatever happened."""

import errno
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.fixtures.artifact_stores import BOB, TTL, Clock, a_call, a_store, collector_of, keep, limits, receive
from tests.fixtures.steps import steps

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts import record
from glovebox_server.artifacts.record import Artifact


async def test_publishing_takes_the_same_steps_however_many_artifacts_there_are(tmp_path: Path) -> None:
    """Beside 4 and beside 40, half of them of another server; and so does being refused."""
    taken: dict[int, tuple[int, int]] = {}
    async with a_store(tmp_path / "q", total=50) as store, a_store(tmp_path / "q") as other:
        for number in range(1, 41):
            await keep((store, other)[number % 2], "a", b"x")
            if number not in (4, 40):
                continue
            async with collector_of(store, a_call(), limits()) as collection:
                small, large = await receive(collection, "a", b"x"), await receive(collection, "b", b"x" * 50)

                def refuse(large: Artifact = large) -> None:
                    with pytest.raises(RefusedError):
                        store.disk.publish((large,), store.clock())

                published = steps(partial(store.disk.publish, (small,), store.clock()))
                taken[number] = published, steps(refuse)
    assert taken[4] == taken[40]


class Killed(BaseException):
    """The end of a process at this moment."""


@pytest.mark.parametrize("happened", ["nothing", "withdrawn", "expired", "swept", "failed", "killed", "torn", "gone"])
async def test_what_fits_is_right_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happened: str
) -> None:
    """To the byte, as another server sees it: beside six of ten there are four, without them all ten."""
    clock, breaks = Clock(), {"failed": OSError(errno.EIO, "it broke"), "killed": Killed()}
    async with a_store(tmp_path / "q", clock, total=10) as store, a_store(tmp_path / "q", clock, total=10) as other:
        async with collector_of(store, a_call(), limits()) as collection:
            found = (await receive(collection, "a", b"123456"),)
            if problem := breaks.get(happened):  # the file is there, and not counted yet
                monkeypatch.setattr(record, "_sync", Mock(side_effect=problem))
                with pytest.raises(type(problem)):
                    store.disk.publish(found, clock.now)
                monkeypatch.undo()
            else:
                store.disk.publish(found, clock.now)
        if happened == "withdrawn":
            store.disk.withdraw(found)
            store.disk.withdraw(found)
        elif happened in ("expired", "swept"):
            clock.now += TTL
            assert happened == "expired" or await other.sweep() == 1
        elif happened == "torn":
            (tmp_path / "q" / "totals" / "all").write_bytes(b"[0, 0")
        elif happened == "gone":
            shutil.rmtree(tmp_path / "q" / "items" / found[0].id)
            await store.sweep()
        left = 4 if happened in ("nothing", "killed", "torn") else 10
        for size in (left + 1, left, 1):
            with nullcontext() if size == left else pytest.raises(RefusedError, match="into its 10"):
                await keep(other, "b", b"x" * size, principal=BOB)
