"""What the tests of the artifact store share: a store with a clock turned by hand, and calls of two principals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from glovebox_sandboxes.contract.spec import Limits
from glovebox_server.artifacts.collect import Collection
from glovebox_server.artifacts.record import Artifact
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.broker.calls import Principal, ToolCall

ALICE = Principal(id="token:alice", transport="http")
BOB = Principal(id="token:bob", transport="http")
TTL = timedelta(hours=1)
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big") + b"\x08\x02\0\0\0"


@dataclass
class Clock:
    """Time that stands still until a test moves it."""

    now: datetime = field(default_factory=lambda: datetime(2026, 11, 20, tzinfo=UTC))

    def __call__(self) -> datetime:
        """Return the time."""
        return self.now


def a_call(principal: Principal = ALICE, number: int = 1) -> ToolCall:
    """Return a call of ``run_python``."""
    identifier = f"c_{number:026d}"
    received = datetime(2026, 11, 20, tzinfo=UTC)
    return ToolCall(
        id=identifier, principal=principal, session=None, tool="run_python", arguments={}, received=received
    )


def limits(*, output_bytes: int = 1_000_000, output_files: int = 8) -> Limits:
    """Return limits of which only those for output matter here."""
    return Limits(
        wall_seconds=1,
        cpu_seconds=1,
        memory_bytes=1,
        pids=1,
        scratch_bytes=1,
        output_bytes=output_bytes,
        output_files=output_files,
        stream_bytes=1,
    )


def a_store(directory: Path, clock: Clock | None = None, *, total: int = 10_000_000, owner: int = 0) -> ArtifactStore:
    """Return a store that was not entered yet."""
    return ArtifactStore(
        directory, clock=clock or Clock(), ttl=TTL, max_bytes_total=total, max_bytes_owner=owner or total
    )


async def receive(collection: Collection, name: str, *chunks: bytes) -> Artifact:
    """Receive one whole file."""
    async with collection.receive(name) as sink:
        for chunk in chunks:
            await sink.write(chunk)
    assert sink.artifact is not None
    return sink.artifact


async def keep(store: ArtifactStore, name: str, *chunks: bytes, principal: Principal = ALICE) -> Artifact:
    """Collect and publish one file as a call of its own."""
    async with store.collect(a_call(principal), limits()) as collection:
        await receive(collection, name, *chunks)
        (artifact,) = await collection.publish()
    return artifact


async def content(store: ArtifactStore, uri: str, principal: Principal = ALICE) -> bytes:
    """Read one artifact whole."""
    async with store.open(uri, principal) as reader:
        return await reader.read(10_000_000)


def files(directory: Path) -> set[str]:
    """Return every file below a directory, relative to it; folders are left out."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()}


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Assert that nothing is added below a directory."""
    before = files(directory)
    yield
    assert files(directory) == before
