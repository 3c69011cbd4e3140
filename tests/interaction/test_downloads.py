"""Artifacts over plain HTTP: bytes on a real socket, whole and in ranges, for the token's owner and nobody else."""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures import artifact_stores
from tests.fixtures.artifact_stores import ALICE, BOB
from tests.interaction.served import TIMEOUT_SECONDS, Served, served

from glovebox_server.artifacts.record import Artifact
from glovebox_server.artifacts.store import ArtifactReader
from glovebox_server.calls import Principal
from glovebox_server.transport import downloads

WHOLE = bytes(range(256)) * 2000


async def keep(server: Served, name: str, content: bytes = WHOLE, principal: Principal = ALICE) -> Artifact:
    """Put an artifact into the server's store, as a call would."""
    return await artifact_stores.keep(server.app.artifacts, name, content, principal=principal)


async def ask(
    server: Served, path: str, name: str = "alice", method: str = "GET", **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """Send one request; return status, fields by lower-case name, and body."""
    host, port = server.url.removeprefix("http://").split(":")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close"]
    if name:
        lines.append(f"Authorization: Bearer {server.tokens[name]}")
    lines += [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    received = b""
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
            async for piece in stream:
                received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    pairs = [field.split(": ", 1) for field in fields]
    return int(status.split(" ", 2)[1]), {key.lower(): value for key, value in pairs}, body


@asynccontextmanager
async def serving(directory: Path, name: str = "plots/ä b.bin") -> AsyncIterator[tuple[Served, Artifact, str]]:
    """A server with one artifact of alice's, and its path."""
    async with served(directory, "http") as server:
        artifact = await keep(server, name)
        yield server, artifact, f"/artifacts/{artifact.id}"


async def test_an_artifact_is_downloaded_whole_and_inert(tmp_path: Path) -> None:
    """Saved under its own name, and nothing a browser would run, guess at, frame or keep."""
    async with serving(tmp_path) as (server, artifact, path):
        status, fields, body = await ask(server, path)
        assert (status, body) == (200, WHOLE)
        assert fields["content-length"] == str(len(WHOLE))
        assert fields["content-disposition"] == "attachment; filename*=UTF-8''%C3%A4%20b.bin"
        assert fields["x-content-type-options"] == "nosniff"
        assert "sandbox" in fields["content-security-policy"]
        assert fields["cross-origin-resource-policy"] == "same-origin"
        assert fields["cache-control"] == "private, no-store"
        assert fields["etag"] == f'"{artifact.sha256}"'
        assert json.loads(fields["glovebox-risks"]) == list(artifact.risks)
        status, fields, body = await ask(server, path, method="HEAD")
        assert (status, fields["content-length"], body) == (200, str(len(WHOLE)), b"")
        table = await keep(server, "table.csv", b"a,b\n1,2\n")
        assert "glovebox-risks" not in (await ask(server, f"/artifacts/{table.id}"))[1]


async def test_active_documents_are_text_with_their_risks(tmp_path: Path) -> None:
    """No name of a program's becomes a field of ours, and HTML has no type that renders."""
    async with serving(tmp_path) as (server, _, _):
        page = await keep(server, "it's;x=1%0d%0a.html", b"<html><script>alert(1)</script></html>")
        status, fields, body = await ask(server, f"/artifacts/{page.id}")
    assert (status, body[:6]) == (200, b"<html>")
    assert fields["content-type"] == "text/plain; charset=utf-8"
    assert fields["content-disposition"] == "attachment; filename*=UTF-8''it%27s%3Bx%3D1%250d%250a.html"
    assert json.loads(fields["glovebox-risks"]) == list(page.risks)


END = len(WHOLE)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        (f"bytes={END - 1}-", (END - 1, END)),
        (f"bytes=300000-{END + 5}", (300_000, END)),
        ("bytes=-5", (END - 5, END)),
        (f"bytes=-{END + 1}", None),
        ("bytes=0-", None),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("items=0-1", None),
        ("bytes=0-1,5-9", None),
        ("bytes=" + "9" * 19 + "-", None),
        ("bytes=٣-", None),
    ],
)
async def test_one_range_is_served_and_what_is_none_is_ignored(
    asked: str, part: tuple[int, int] | None, tmp_path: Path
) -> None:
    """RFC 9110, section 14.2: an invalid range, or several, give the whole."""
    async with serving(tmp_path) as (server, _, path):
        status, fields, body = await ask(server, path, range=asked.encode().decode("latin-1"))
    if part is None:
        assert (status, body) == (200, WHOLE)
        assert "content-range" not in fields
    else:
        assert (status, body) == (206, WHOLE[slice(*part)])
        assert fields["content-range"] == f"bytes {part[0]}-{part[1] - 1}/{END}"


async def test_a_range_behind_the_end_is_told_how_long_the_artifact_is(tmp_path: Path) -> None:
    """416, without a byte; and a range for another version of it is none."""
    async with serving(tmp_path) as (server, artifact, path):
        for asked in (f"bytes={END}-", f"bytes={END}-{END + 1}", "bytes=-0"):
            status, fields, body = await ask(server, path, range=asked)
            assert (status, fields["content-range"], body) == (416, f"bytes */{END}", b"")
        assert (await ask(server, path, range="bytes=0-0", if_range='"other"'))[0] == 200
        assert (await ask(server, path, range="bytes=0-0", if_range=f'"{artifact.sha256}"'))[0] == 206


async def test_what_is_not_the_callers_does_not_exist(tmp_path: Path) -> None:
    """M3: another's, one that never was (in the same words), and every other way to write the path: 404.

    The control: bob has one of his own.
    """
    async with serving(tmp_path) as (server, artifact, path):
        missing = await ask(server, "/artifacts/" + "0" * 32, "bob")
        for asked in ({}, {"range": "bytes=0-0"}, {"range": f"bytes={END}-"}):
            status, fields, body = await ask(server, path, "bob", **asked)
            assert (status, body) == (404, missing[2])
            assert fields.keys() == missing[1].keys()
        assert b"There is no artifact of yours" in missing[2]
        for other in (
            f"/artifacts/{artifact.id}/",
            f"/artifacts//{artifact.id}",
            f"/artifacts/{artifact.id}/record.json",
            f"/artifacts/{artifact.id.upper()}",
            f"/artifacts/{artifact.id}%00",
            f"/artifacts/%2e%2e%2fitems%2f{artifact.id}",
            f"/artifacts/..%2f{artifact.id}",
            f"/artifacts/../artifacts/{artifact.id}",
            f"/artifacts/artifact://{artifact.id}",
            "/artifacts/",
            "/artifacts",
        ):
            status, _, body = await ask(server, other)
            assert status in {404, 307}, other
            assert WHOLE[:100] not in body
        own = await keep(server, "b.bin", b"his", BOB)
        assert (await ask(server, f"/artifacts/{own.id}", "bob"))[2] == b"his"


async def test_downloads_pass_the_gate(tmp_path: Path) -> None:
    """M1, M2: no token, foreign names and origins, and methods that change things; the control is the whole above."""
    async with serving(tmp_path) as (server, _, path):
        assert (await ask(server, path, ""))[0] == 401
        assert (await ask(server, f"{path}?token={server.tokens['alice']}", ""))[0] == 401
        assert (await ask(server, path, origin="http://evil.example"))[0] == 403
        for method in ("DELETE", "PUT", "PATCH", "OPTIONS"):
            assert (await ask(server, path, method=method))[0] == 405


async def test_an_artifact_that_is_downloaded_in_ranges_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each range, nor twice for all of it."""
    hashed, chunks = list[int](), ArtifactReader.chunks

    def counted(reader: ArtifactReader) -> AsyncGenerator[bytes, None]:
        hashed.append(reader.artifact.bytes)
        return chunks(reader)

    monkeypatch.setattr(ArtifactReader, "chunks", counted)
    async with serving(tmp_path) as (server, artifact, path):
        os.utime(tmp_path / "artifacts" / "items" / artifact.id / "content", ns=(0, 0))
        for at in range(0, END, 100_000):
            assert (await ask(server, path, range=f"bytes={at}-{at + 99_999}"))[2] == WHOLE[at : at + 100_000]
        assert (await ask(server, path))[2] == WHOLE
    assert hashed == [END]


async def test_altered_content_is_not_sent(tmp_path: Path) -> None:
    """503 before the first byte; as it was, it is sent (control)."""
    async with serving(tmp_path) as (server, artifact, path):
        assert (await ask(server, path, range="bytes=0-0"))[0] == 206
        place = tmp_path / "artifacts" / "items" / artifact.id / "content"
        place.write_bytes(WHOLE[:-1] + b"x")
        status, _, body = await ask(server, path, range="bytes=0-0")
    assert status == 503
    assert str(tmp_path).encode() not in body


async def test_a_client_that_does_not_read_has_few_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one of the same caller gets 429, and another's is sent at once; later his is sent too."""
    monkeypatch.setattr(downloads, "PIECE_SECONDS", 0.5)
    async with served(tmp_path, "http") as server:
        monkeypatch.setattr(server.app.artifacts.disk, "_max_bytes_total", 1 << 27)
        large = await keep(server, "large.bin", bytes(9_000_000))
        small = await keep(server, "small.bin", b"his", BOB)
        host, port = server.url.removeprefix("http://").split(":")
        fields = f"Host: {host}:{port}\r\nAuthorization: Bearer {server.tokens['alice']}"
        request = f"GET /artifacts/{large.id} HTTP/1.1\r\n{fields}\r\n\r\n"
        streams = [await anyio.connect_tcp(host, int(port)) for _ in range(downloads.MAX_DOWNLOADS)]
        for stream in streams:
            await stream.send(request.encode())
            assert (await stream.receive(20)).startswith(b"HTTP/1.1 200")
        assert (await ask(server, f"/artifacts/{large.id}"))[0] == 429
        assert (await ask(server, f"/artifacts/{small.id}", "bob"))[2] == b"his"
        with anyio.fail_after(TIMEOUT_SECONDS):
            while (await ask(server, f"/artifacts/{large.id}"))[0] != 200:
                pass
        for stream in streams:
            await stream.aclose()
