"""Artifacts that are too large for one message are read part by part, by their owner and nobody else."""

import base64
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures.artifact_stores import ALICE, BOB, a_store, keep
from tests.unit.test_secret_corpus import POSITIVES

from glovebox_server.artifacts import store as artifact_store
from glovebox_server.artifacts.store import ArtifactReader, ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.mcp import resources
from glovebox_server.mcp.delivery import REDACTED_META_KEY, SHA256_META_KEY
from glovebox_server.mcp.resources import ARTIFACT_READERS, MAX_PART_BYTES, PART_META_KEY, Resources

UNKNOWN = "There is no artifact of yours at this address"


@dataclass
class Stores:
    """What resources are read from."""

    artifacts: ArtifactStore
    redact: str

    def redaction(self, _principal: Principal, tool: str | None) -> tuple[str, Forms]:
        """As a profile has it; nothing is lent."""
        assert tool
        return self.redact, {}


@asynccontextmanager
async def reading(directory: Path, redact: str = "mask") -> AsyncIterator[tuple[Resources, ArtifactStore]]:
    """Resources over a real store."""
    async with a_store(directory) as store:
        yield Resources(cast("Any", Stores(store, redact)), anyio.Event()), store


def content(result: types.ReadResourceResult) -> tuple[bytes, dict[str, Any]]:
    """Bytes and what is said of the part."""
    (only,) = result.contents
    data = only.text.encode() if isinstance(only, types.TextResourceContents) else base64.b64decode(only.blob)
    return data, (only.meta or {}).get(PART_META_KEY, {})


@pytest.mark.parametrize(
    ("name", "whole"),
    [("a.bin", bytes(range(256)) * 3000), ("a.txt", "äöü€😀 ".encode() * 45_000), ("b.csv", b"1,2\n" * 200_000)],
)
async def test_parts_that_name_the_next_are_the_whole(name: str, whole: bytes, tmp_path: Path) -> None:
    """Text stays text, though characters lie across the parts; in one message it is refused and told how (control)."""
    async with reading(tmp_path) as (resources, store):
        uri = (await keep(store, name, whole)).uri
        with pytest.raises(MCPError, match="can be read at once") as caught:
            await resources.read(ALICE, uri)
        assert f"{uri}?offset=0&length={MAX_PART_BYTES}" in str(caught.value)
        following: str | None = f"{uri}?offset=0&length=100001"
        found, kinds = b"", set()
        while following:
            result = await resources.read(ALICE, following)
            data, about = content(result)
            assert result.contents[0].uri == following
            assert (about["offset"], about["bytes"], about["of"]) == (len(found), len(data), len(whole))
            assert 0 < len(data) <= 100_001
            kinds.add(type(result.contents[0]))
            found += data
            following = about.get("next")
    assert found == whole
    assert kinds == {types.BlobResourceContents if name == "a.bin" else types.TextResourceContents}


async def test_a_part_in_the_middle_of_a_character_is_bytes(tmp_path: Path) -> None:
    """Three bytes of one are these three, and the control is whole; of an empty artifact there is an empty part."""
    async with reading(tmp_path) as (resources, store):
        uri = (await keep(store, "a.txt", "😀😀".encode())).uri
        for query, data in (("offset=0&length=3", "😀".encode()[:3]), ("length=6&offset=1", "😀😀".encode()[1:7])):
            result = await resources.read(ALICE, f"{uri}?{query}")
            assert isinstance(result.contents[0], types.BlobResourceContents)
            assert content(result)[0] == data
        assert content(await resources.read(ALICE, f"{uri}?offset=4"))[0] == "😀".encode()
        uri = (await keep(store, "a.bin")).uri
        assert content(await resources.read(ALICE, f"{uri}?offset=0")) == (b"", {"offset": 0, "bytes": 0, "of": 0})


BAD = [
    "", "offset", "offset=", "offset=-1", "offset=+1", "offset=1.5", "offset=0x1", "offset=٣", "offset=1&offset=1",
    "offset=0&length=0", f"length={MAX_PART_BYTES + 1}", "offset=0&", "offset=0;length=1", "offset=0&more=1",
    "offset=3",
    "offset=0#x", "offset= 1", "OFFSET=1", f"offset={'9' * 16}", "offset=0?length=1", "&".join(["offset=0"] * 10_000),
]  # fmt: skip


@pytest.mark.parametrize("query", BAD, ids=[query[:20] for query in BAD])
async def test_a_part_that_is_none_is_refused(query: str, tmp_path: Path) -> None:
    """For the owner, who is told the form; for anybody else there is no artifact, whatever he asks (control)."""
    async with reading(tmp_path) as (resources, store):
        uri = (await keep(store, "a.bin", b"\0\1\2")).uri
        with pytest.raises(MCPError) as caught:
            await resources.read(ALICE, f"{uri}?{query}")
        assert (caught.value.error.code, caught.value.error.data["rule"]) == (-32602, "artifacts.part")
        for address in (f"{uri}?{query}", f"{uri}?offset=0", f"artifact://{'0' * 32}?offset=0"):
            with pytest.raises(MCPError, match=UNKNOWN) as caught:
                await resources.read(BOB, address)
            assert caught.value.error.data["rule"] == "artifacts.unknown"


async def test_no_part_of_altered_content_is_given(tmp_path: Path) -> None:
    """Not even one that is as it was; before, it was given (control)."""
    async with reading(tmp_path) as (resources, store):
        artifact = await keep(store, "a.bin", bytes(1000))
        first = f"{artifact.uri}?offset=0&length=10"
        assert content(await resources.read(ALICE, first))[0] == bytes(10)
        place = tmp_path / "items" / artifact.id / "content"
        place.write_bytes(bytes(999) + b"x")
        with pytest.raises(MCPError, match="no longer matches its sha256"):
            await resources.read(ALICE, first)


async def test_an_artifact_that_is_read_in_parts_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each part, until it was changed; one just written could change under the same time and is (control)."""
    hashed = 0

    class Counted:
        def __init__(self) -> None:
            self._digest = hashlib.sha256()

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    whole = os.urandom(1_000_000)
    async with reading(tmp_path) as (resources, store):
        artifact = await keep(store, "a.bin", whole)
        place = tmp_path / "items" / artifact.id / "content"

        async def read() -> int:
            nonlocal hashed
            hashed, found = 0, b""
            for at in range(0, len(whole), 100_000):
                found += content(await resources.read(ALICE, f"{artifact.uri}?offset={at}&length=100000"))[0]
            assert found == whole
            return hashed

        monkeypatch.setattr(artifact_store, "hashlib", SimpleNamespace(sha256=Counted))
        clock = SimpleNamespace(time_ns=lambda: place.stat().st_mtime_ns)
        monkeypatch.setattr(artifact_store, "time", clock)
        assert await read() == 10 * len(whole)
        clock.time_ns = lambda: place.stat().st_mtime_ns + 10**9
        assert await read() == len(whole)
        assert await read() == 0
        os.utime(place, ns=(0, 0))
        assert await read() == len(whole)
        place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(MCPError, match="no longer matches its sha256"):
            await read()


TOKEN = POSITIVES[0].partition("=")[2]


@pytest.mark.parametrize("query", ["", "?offset=0"])
@pytest.mark.parametrize("noise", [b"", bytes(range(256))])
async def test_secrets_in_a_file_are_not_shown(query: str, noise: bytes, tmp_path: Path) -> None:
    """Whole or in part, text or not: replaced and counted; what is kept, and its digest, stay as they were."""
    whole = noise + f"token {TOKEN}\n".encode() + noise
    async with reading(tmp_path) as (resources, store):
        artifact = await keep(store, "a.txt", whole)
        result = await resources.read(ALICE, artifact.uri + query)
        assert content(result)[0] == noise + b"token [secret: GitHub token]\n" + noise
        meta = result.contents[0].meta or {}
        assert meta[REDACTED_META_KEY] == {"GitHub token": 1}
        assert meta.get(SHA256_META_KEY, hashlib.sha256(whole).hexdigest()) == hashlib.sha256(whole).hexdigest()
        async with store.open(artifact.uri, ALICE) as reader:
            assert await reader.read(MAX_PART_BYTES) == whole


async def test_a_profile_says_whether_a_file_with_secrets_is_shown(tmp_path: Path) -> None:
    """With ``refuse`` nothing of it is, though a file without is; with ``none`` all is (controls)."""
    for redact in ("refuse", "none"):
        async with reading(tmp_path / redact, redact) as (resources, store):
            plain, secret = [(await keep(store, name, text.encode())).uri for name, text in (("a", "a"), ("b", TOKEN))]
            assert content(await resources.read(ALICE, plain))[0] == b"a"
            if redact == "none":
                assert content(await resources.read(ALICE, secret))[0] == TOKEN.encode()
                continue
            for uri in (secret, f"{secret}?offset=0"):
                with pytest.raises(MCPError) as caught:
                    await resources.read(ALICE, uri)
                assert caught.value.error.data["rule"] == "result.redact"
                assert TOKEN not in str(caught.value)


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


@pytest.mark.long
async def test_two_hundred_reads_at_once_are_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 connections of one caller took the server from 85 to 198 MiB, now to 103. Control: without the bound."""
    assert ARTIFACT_READERS == 4
    assert await most_open(tmp_path / "bound") == 3  # the fourth is kept for others
    monkeypatch.setattr(resources, "ARTIFACT_READERS", READS)
    assert await most_open(tmp_path / "control") > READS // 2
