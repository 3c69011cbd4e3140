"""Artifacts that are read over MCP pass through memory a few at a time, however many ask."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from tests.fixtures.artifact_stores import ALICE, a_store, keep
from tests.unit.test_resource_parts import Stores

from glovebox_server.artifacts.store import ArtifactReader, ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.mcp import resources
from glovebox_server.mcp.resources import ARTIFACT_READERS, Resources

READS = 200


class Counted:
    """A store that counts how many artifacts are open at one time."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._open = 0
        self.most = 0

    @asynccontextmanager
    async def open(self, uri: str, principal: Principal) -> AsyncIterator[ArtifactReader]:
        """As the store does."""
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            async with self._store.open(uri, principal) as reader:
                yield reader
        finally:
            self._open -= 1


async def most_open(directory: Path) -> int:
    """How many are open at one time while one caller asks 200 times at once; each is answered."""
    async with a_store(directory) as store:
        uri = (await keep(store, "a.bin", bytes(100_000))).uri
        stores = cast("Any", Stores(cast("ArtifactStore", Counted(store)), "mask"))
        served, answers = Resources(stores, anyio.Event()), list[object]()

        async def read() -> None:
            answers.append(await served.read(ALICE, uri))

        async with anyio.create_task_group() as tasks:
            for _ in range(READS):
                tasks.start_soon(read)
        assert len(answers) == READS
        return cast("Counted", stores.artifacts).most


async def test_two_hundred_reads_at_once_are_a_few_at_a_time(tmp_path: Path) -> None:
    """200 connections of one caller took the server from 85 to 198 MiB, and take it to 103."""
    assert ARTIFACT_READERS == 4
    assert await most_open(tmp_path) == 3  # the fourth is kept for others


async def test_the_control_without_the_bound_all_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the count above would say nothing."""
    monkeypatch.setattr(resources, "ARTIFACT_READERS", READS)
    assert await most_open(tmp_path) > READS // 2
