"""The artifact store, and artifacts as inputs: what goes in comes out for its owner, whole, within its limits."""

import hashlib
import os
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from pydantic import AnyUrl
from tests.fixtures.artifact_stores import (
    ALICE,
    BOB,
    PNG,
    TTL,
    Clock,
    a_call,
    a_store,
    collector_of,
    content,
    files,
    keep,
    limits,
    receive,
    receiving,
    untouched,
)

from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.app import ARTIFACT_PARTS
from glovebox_server.artifacts import diff_form, record
from glovebox_server.artifacts.collect import FLUSH_BYTES
from glovebox_server.artifacts.record import ArtifactStoreError, decode, encode, id_of
from glovebox_server.artifacts.store import CHUNK_BYTES, ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.core.call import MAX_INPUT_BYTES, Inputs, open_inputs


async def test_the_patches_of_a_call_share_what_reading_may_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines in many files cost no more than in one; the next call reads its own (control)."""
    monkeypatch.setattr(diff_form, "_WORK", 100_000)
    async with a_store(tmp_path / "q") as store:
        async with collector_of(store, a_call(), limits()) as collection:
            made = [await receive(collection, f"{number}.patch", b"\n" * 500) for number in range(3)]
        again = await keep(store, "0.patch", b"\n" * 500)
    unread = ["not read in full" in " ".join(each.risks) for each in (*made, again)]
    assert unread == [False, True, True, False]


async def refused(store: ArtifactStore, uri: str) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        await content(store, uri)
    return found.value


async def test_a_file_comes_back_with_its_record(tmp_path: Path) -> None:
    clock, data = Clock(), PNG + os.urandom(3 * FLUSH_BYTES)
    async with a_store(tmp_path / "q", clock) as store:
        async with collector_of(store, a_call(), limits()) as collection:
            pieces = (data[at : at + 9999] for at in range(0, len(data), 9999))
            found = await receive(collection, "plots/a.png", *pieces)
            assert collection.sealed == [found]
            assert await collection.publish() == (found,)
        assert await content(store, found.uri) == data
        async with store.open(found.uri, ALICE) as reader:
            assert reader.artifact == found
            assert b"".join([chunk async for chunk in reader.chunks()]) == data
    assert (found.owner, found.call_id, found.name) == (ALICE.id, a_call().id, "plots/a.png")
    assert (found.client, found.run, found.workflow) == ("C 1", "r_1", "release")
    assert (found.sha256, found.bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (found.media_type, found.risks) == ("image/png", ())
    assert (found.created, found.expires) == (clock.now, clock.now + TTL)


async def test_an_address_survives_a_url_parser_and_cannot_be_guessed(tmp_path: Path) -> None:
    """Clients parse resource addresses; the random part has 128 bits and differs for equal content."""
    async with a_store(tmp_path / "q") as store:
        first, second = await keep(store, "a.txt", b"x"), await keep(store, "a.txt", b"x")
        assert first.uri != second.uri
        assert len(first.id) * 4 == 128
        assert str(AnyUrl(first.uri)) == first.uri
        assert await content(store, str(AnyUrl(first.uri))) == b"x"


async def test_everything_on_disk_is_private_and_named_at_random(tmp_path: Path) -> None:
    """Folders 0700, files 0600 whatever the umask, no executable bit, and no name from the sandbox."""
    before = os.umask(0)
    try:
        async with a_store(tmp_path / "q") as store:
            found = await keep(store, ".git/hooks/pre-commit", b"#!/bin/sh\n")
    finally:
        os.umask(before)
    assert any("git runs" in risk for risk in found.risks)
    for path in [tmp_path / "q", *(tmp_path / "q").rglob("*")]:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600)
    item = f"items/{found.id}"
    assert files(tmp_path / "q") == {f"{item}/content", f"{item}/record.json"}


async def test_an_expired_artifact_is_unknown_before_and_after_it_is_swept(tmp_path: Path) -> None:
    """Expiry does not wait for the sweep, and an open reader is not disturbed by it."""
    clock = Clock()
    async with a_store(tmp_path / "q", clock) as store:
        found = await keep(store, "a.txt", b"x")
        clock.now += TTL - timedelta(microseconds=1)
        async with store.open(found.uri, ALICE) as reader:
            clock.now += timedelta(microseconds=1)
            before = await refused(store, found.uri)
            assert await store.sweep() == 1
            assert await reader.read(1) == b"x"
        after = await refused(store, found.uri)
    assert (before.rule, str(before)) == (after.rule, str(after))
    assert before.rule == "artifacts.unknown"


async def test_nothing_is_visible_before_it_is_published_or_kept_without_it(tmp_path: Path) -> None:
    """The audit record comes first: leaving without publish, or by an exception, removes the content."""
    async with a_store(tmp_path / "q") as store:
        with untouched(tmp_path / "q"):
            async with collector_of(store, a_call(), limits()) as collection:
                found = await receive(collection, "a.txt", b"x")
                assert (await refused(store, found.uri)).rule == "artifacts.unknown"
            assert (await refused(store, found.uri)).rule == "artifacts.unknown"
        kept = await keep(store, "a.txt", b"x")
        assert await content(store, kept.uri) == b"x"


async def test_an_interrupted_file_leaves_nothing_and_the_others_stay(tmp_path: Path) -> None:
    """An exception in the middle of one file concerns this file alone."""
    async with a_store(tmp_path / "q") as store:
        async with collector_of(store, a_call(), limits()) as collection:
            await receive(collection, "whole.txt", b"whole")
            with untouched(tmp_path / "q"), pytest.raises(EOFError):  # noqa: PT012 - the interruption is the subject
                async with receiving(collection, "half.txt") as sink:
                    await sink.data(b"x" * FLUSH_BYTES)
                    raise EOFError
            (found,) = await collection.publish()
        assert found.name == "whole.txt"
        assert await content(store, found.uri) == b"whole"


async def test_several_files_may_arrive_at_once(tmp_path: Path) -> None:
    async with a_store(tmp_path / "q") as store, collector_of(store, a_call(), limits()) as collection:
        async with receiving(collection, "a.txt") as first, receiving(collection, "b.txt") as second:
            for _ in range(100):
                await first.data(b"a")
                await second.data(b"b")
        one, other = await collection.publish()
        assert {one.name: await content(store, one.uri), other.name: await content(store, other.uri)} == {
            "a.txt": b"a" * 100,
            "b.txt": b"b" * 100,
        }


async def test_the_limits_of_the_call_bound_its_bytes_and_files(tmp_path: Path) -> None:
    """F6: exactly the limit fits (control); names that were refused count, or they would be free."""
    async with a_store(tmp_path / "q") as store, collector_of(store, a_call(), limits(output_bytes=10)) as collection:
        await receive(collection, "six", b"123456")
        with pytest.raises(RefusedError) as too_big:
            await receive(collection, "more", b"12345")
        assert too_big.value.rule == "artifacts.bytes"
        assert "10 bytes" in too_big.value.reason
        await receive(collection, "four", b"1234")
        assert [found.name for found in await collection.publish()] == ["six", "four"]
    async with a_store(tmp_path / "q") as store, collector_of(store, a_call(), limits(output_files=2)) as collection:
        with pytest.raises(RefusedError) as caught:
            await receive(collection, "../a")
        assert caught.value.rule == "artifacts.name"
        await receive(collection, "a")
        with pytest.raises(RefusedError) as too_many:
            await receive(collection, "b")
        assert too_many.value.rule == "artifacts.count"
        assert "2 output files" in too_many.value.reason


async def test_a_file_whose_write_failed_cannot_end_well(tmp_path: Path) -> None:
    """Who swallows the refusal of a chunk still does not get a file with a hole in it."""
    async with a_store(tmp_path / "q") as store, collector_of(store, a_call(), limits(output_bytes=4)) as collection:
        async with receiving(collection, "a") as sink:
            with pytest.raises(RefusedError) as found:
                await sink.data(b"12345")
            await sink.data(b"1")
        assert found.value.rule == "artifacts.bytes"
        assert sink.artifact is None
        assert await collection.publish() == ()


async def test_a_full_store_makes_room_of_what_expired_and_else_refuses(tmp_path: Path) -> None:
    """Unexpired artifacts are never evicted: the new one is refused with its reason and leaves nothing."""
    clock = Clock()
    async with a_store(tmp_path / "q", clock, total=10) as store:
        old = await keep(store, "a", b"123456")
        with untouched(tmp_path / "q"), pytest.raises(RefusedError) as full:
            await keep(store, "b", b"12345")
        assert full.value.rule == "artifacts.full"
        assert "5 more bytes do not fit into its 10" in full.value.reason
        assert await content(store, old.uri) == b"123456"
        clock.now += TTL
        new = await keep(store, "b", b"12345")
        assert await content(store, new.uri) == b"12345"
        assert len(list((tmp_path / "q" / "items").iterdir())) == 1


async def test_equal_content_counts_each_time_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the room left would tell what another has stored; empty files cost inodes and memory."""
    async with a_store(tmp_path / "q", total=10) as store:
        await keep(store, "a", b"123456")
        with pytest.raises(RefusedError) as caught:
            await keep(store, "a", b"123456", principal=BOB)
        assert caught.value.rule == "artifacts.full"
    monkeypatch.setattr(record, "MAX_ARTIFACTS", 2)
    async with a_store(tmp_path / "empty") as store:
        await keep(store, "a")
        await keep(store, "b")
        with pytest.raises(RefusedError) as full:
            await keep(store, "c")
    assert full.value.rule == "artifacts.full"
    assert "2 files" in full.value.reason


async def test_one_principal_cannot_fill_the_store_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with bytes nor with empty files: Alice is refused at her share while Bob still fits (control)."""
    async with a_store(tmp_path / "q", total=40, parts=ARTIFACT_PARTS) as store:
        await keep(store, "a", b"123456")
        with pytest.raises(RefusedError) as full:
            await keep(store, "b", b"12345")
        assert full.value.rule == "artifacts.full"
        assert "Your artifacts may hold 10 bytes;" in full.value.reason
        await keep(store, "b", b"12345", principal=BOB)
    monkeypatch.setattr(record, "MAX_ARTIFACTS", 8)
    async with a_store(tmp_path / "empty", parts=ARTIFACT_PARTS) as store:
        await keep(store, "a")
        await keep(store, "b")
        with pytest.raises(RefusedError) as full:
            await keep(store, "c")
        assert full.value.rule == "artifacts.full"
        assert "You may have 2 artifacts at one time" in full.value.reason
        await keep(store, "c", principal=BOB)


async def test_a_role_may_have_less_room_than_the_store_gives_and_never_more(tmp_path: Path) -> None:
    """Refused at the role's room, with its number; a role with more than the share changes nothing."""
    async with a_store(tmp_path / "q", total=40, parts=ARTIFACT_PARTS) as store:
        for room, reason in ((4, "may hold 4 bytes"), (400, "may hold 10 bytes")):
            async with collector_of(store, a_call(), limits(), room) as collection:
                await receive(collection, "a", b"12345678901")
                with pytest.raises(RefusedError, match=reason) as full:
                    await collection.publish()
                assert full.value.rule == "artifacts.full"
        async with collector_of(store, a_call(), limits(), 4) as collection:
            await receive(collection, "a", b"1234")
            assert await collection.publish()


async def test_a_large_artifact_is_not_read_whole_but_in_pieces(tmp_path: Path) -> None:
    """The bound of one message is the reader's to say; the refusal names the way that works."""
    async with a_store(tmp_path / "q") as store:
        found = await keep(store, "a", b"12345")
        async with store.open(found.uri, ALICE) as reader:
            with pytest.raises(RefusedError) as large:
                await reader.read(4)
            assert large.value.rule == "artifacts.too_large"
            assert "`inputs`" in large.value.hint
            assert [chunk async for chunk in reader.chunks()] == [b"12345"]


async def test_artifacts_outlive_the_server_that_stored_them(tmp_path: Path) -> None:
    """A second server on the directory, at the same time or later, serves them too and counts them."""
    async with a_store(tmp_path / "q") as first:
        found = await keep(first, "a", b"12345")
        async with a_store(tmp_path / "q", total=6) as second:
            assert await content(second, found.uri) == b"12345"
            with pytest.raises(RefusedError) as caught:
                await keep(second, "b", b"12")
            assert caught.value.rule == "artifacts.full"
        assert await content(first, found.uri) == b"12345"
    async with a_store(tmp_path / "q") as third:
        assert await content(third, found.uri) == b"12345"


async def test_a_server_does_not_disturb_a_file_another_is_receiving(tmp_path: Path) -> None:
    """Opening and sweeping clear away only what dead processes left."""
    async with a_store(tmp_path / "q") as first, collector_of(first, a_call(), limits()) as collection:
        await receive(collection, "sealed", b"sealed")
        async with receiving(collection, "half") as sink:
            await sink.data(b"x" * FLUSH_BYTES)
            async with a_store(tmp_path / "q") as second:
                assert await second.sweep() == 0
        for found in await collection.publish():
            assert await content(first, found.uri)


async def test_many_calls_of_two_servers_at_once_stay_apart(tmp_path: Path) -> None:
    """M3 in small: equal and different content, published and swept at the same time; nothing crosses or is lost."""
    got: dict[str, bytes] = {}

    async def work(store: ArtifactStore, number: int) -> None:
        data = str(number % 5).encode()
        got[(await keep(store, "a.txt", data)).uri] = data
        await store.sweep()

    async with a_store(tmp_path / "q") as first, a_store(tmp_path / "q") as second:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(work, (first, second)[number % 2], number)
        for uri, data in got.items():
            assert await content(second, uri) == data
    assert len(got) == 40
    assert not list((tmp_path / "q" / "incoming").iterdir())


def test_a_record_that_was_edited_is_not_a_record() -> None:
    """Unknown fields, wrong types and foreign addresses are errors; the control is the unedited one."""
    good = (
        b'{"uri":"artifact://0123456789abcdef0123456789abcdef","owner":"o","call_id":"c","name":"n","sha256":"'
        + b"0" * 64
        + b'","bytes":1,"media_type":"t","created":"2026-11-20T00:00:00Z","expires":"2026-11-20T01:00:00Z","risks":[]}'
    )
    assert decode(encode(decode(good))) == decode(good)
    for old, new in [
        (b'"bytes":1', b'"bytes":"1"'),
        (b'"bytes":1', b'"bytes":-1'),
        (b'"bytes":1', b'"bytes":1,"x":1'),
        (b"artifact://0", b"artifact://../0"),
        (b"00:00:00Z", b"00:00:00"),
        (b'"owner":"o",', b""),
        (b"}", b""),
    ]:
        assert old in good
        with pytest.raises(ValueError, match="validation error"):
            decode(good.replace(old, new))


def test_only_a_well_formed_address_has_an_id() -> None:
    """What is not exactly an address never gets near a path."""
    good = "0123456789abcdef" * 2
    assert id_of(f"artifact://{good}") == good
    for bad in ["", good, f"artifact://{good}/", f"artifact://{good}\n", f"artifact://{good.upper()}", "artifact://.."]:
        assert id_of(bad) is None


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
