"""Artifacts of earlier calls as inputs: their owner's, few and small enough, under names that do not meet."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.artifact_stores import ALICE, BOB, TTL, Clock, a_call, a_store, keep

from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import CHUNK_BYTES, ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.core.call import MAX_INPUT_BYTES, Inputs, open_inputs


@asynccontextmanager
async def opened(store: ArtifactStore, uris: Iterable[str], principal: Principal = ALICE) -> AsyncIterator[Inputs]:
    async with AsyncExitStack() as stack:
        yield await open_inputs(store, replace(a_call(principal), arguments={"inputs": tuple(uris)}), stack)


async def denial(store: ArtifactStore, *uris: str) -> Refusal:
    with pytest.raises(RefusedError) as refused:
        async with opened(store, uris):
            raise AssertionError
    return refused.value.refusal


async def taken(found: Inputs) -> list[tuple[str, bytes]]:
    return [(name, b"".join([piece async for piece in pieces])) for name, pieces in found.contents()]


async def test_inputs_are_copied_under_their_names(tmp_path: Path) -> None:
    async with a_store(tmp_path) as store:
        one, two = await keep(store, "a/1.csv", b"one"), await keep(store, "2.csv", b"")
        async with opened(store, (two.uri, one.uri)) as found:
            assert await taken(found) == [("2.csv", b""), ("a/1.csv", b"one")]
            assert [given.sha256 for given in found.listed] == [two.sha256, one.sha256]


@pytest.mark.parametrize("uri", ["artifact://" + "0" * 26, "", "file:///etc/passwd", "artifact://../../x", "\udcff"])
async def test_what_is_no_artifact_is_unknown(tmp_path: Path, uri: str) -> None:
    async with a_store(tmp_path) as store:
        assert (await denial(store, uri)).rule == "artifacts.unknown"


async def test_another_principals_artifact_is_unknown(tmp_path: Path) -> None:
    """In exactly the words for one that never was; its owner gets it."""
    async with a_store(tmp_path) as store:
        secret = await keep(store, "secret.csv", b"secret", principal=BOB)
        foreign, missing = await denial(store, secret.uri), await denial(store, "artifact://" + "0" * 26)
        assert foreign == missing
        async with opened(store, (secret.uri,), BOB) as found:
            assert await taken(found) == [("secret.csv", b"secret")]


@pytest.mark.parametrize("second", ["a.csv", "A.CSV", "a.csv/b"])
async def test_two_inputs_of_one_name_are_refused(tmp_path: Path, second: str) -> None:
    """Nothing is renamed or lost behind the program's back; the same artifact twice is such a case too."""
    async with a_store(tmp_path) as store:
        one, two = await keep(store, "a.csv", b"1"), await keep(store, second, b"2")
        for uris in ((one.uri, two.uri), (one.uri, one.uri)):
            assert (await denial(store, *uris)).rule == "artifacts.name"


async def test_inputs_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the sandbox's memory: at the limit they are given, one byte beyond it they are refused."""
    monkeypatch.setattr("glovebox_server.core.call.MAX_INPUT_BYTES", 10)
    assert MAX_INPUT_BYTES == 32 * 1024 * 1024
    async with a_store(tmp_path) as store:
        first = await keep(store, "x", bytes(6))
        fits, beyond = await keep(store, "y", bytes(4)), await keep(store, "z", bytes(5))
        async with opened(store, (first.uri, fits.uri)) as found:
            assert len(found.listed) == 2
        assert (await denial(store, first.uri, beyond.uri)).rule == "files.inputs"


async def test_an_input_that_expires_or_is_swept_meanwhile_is_still_given(tmp_path: Path) -> None:
    """It was theirs when the call was decided: what the record says goes in is what goes in."""
    clock = Clock()
    async with a_store(tmp_path, clock) as store:
        one = await keep(store, "1.csv", b"one")
        async with opened(store, (one.uri,)) as found:
            clock.now += 2 * TTL
            assert await store.sweep() == 1
            assert await taken(found) == [("1.csv", b"one")]
        assert (await denial(store, one.uri)).rule == "artifacts.unknown"


async def test_what_was_changed_on_the_disk_is_told_before_its_end(tmp_path: Path) -> None:
    """Also between two pieces: the last thing said of it is an error, and the guest never begins. Else it is whole."""
    async with a_store(tmp_path) as store:
        one = await keep(store, "1.bin", bytes(CHUNK_BYTES), b"rest")
        async with opened(store, (one.uri,)) as found:
            assert await taken(found) == [("1.bin", bytes(CHUNK_BYTES) + b"rest")]  # the control
        async with opened(store, (one.uri,)) as found:
            ((_, pieces),) = found.contents()
            assert await anext(pieces) == bytes(CHUNK_BYTES)
            (content,) = (tmp_path / "items").glob("*/content")
            with content.open("r+b") as file:
                file.seek(CHUNK_BYTES)
                file.write(b"evil, and longer")
            assert await anext(pieces) == b"evil"
            with pytest.raises(ArtifactStoreError, match="no longer matches its sha256"):
                await anext(pieces)


async def test_descriptors_are_closed_whatever_becomes_of_the_call(tmp_path: Path) -> None:
    """Sixteen inputs of a call that is allowed, of one that is denied at the last, and of one that fails."""
    async with a_store(tmp_path) as store:
        uris = [(await keep(store, f"{number}.csv", b"x")).uri for number in range(16)]
        before = len(list(Path("/proc/self/fd").iterdir()))
        async with opened(store, uris) as found:
            assert len(list(Path("/proc/self/fd").iterdir())) == before + 16  # the control: this is what is counted
            assert len(await taken(found)) == 16
        await denial(store, *uris, "artifact://" + "0" * 32)
        with pytest.raises(ArithmeticError):
            async with opened(store, uris):
                raise ArithmeticError
        assert len(list(Path("/proc/self/fd").iterdir())) == before
