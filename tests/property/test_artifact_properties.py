"""Whatever a sandbox says, the artifact store answers with a record or a documented refusal and stays in its folder."""

import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import anyio
import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tests.fixtures.artifact_stores import ALICE, a_call, a_store, collector_of, content, files, limits, receiving
from tests.fixtures.draws import draws

from _glovebox_guest.pictures.header import size as size_of
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.media import Sniffer
from glovebox_server.artifacts.names import MAX_NAME_BYTES, CallNames, check_name, name_risks, quoted

# Pieces that past attacks were made of, between arbitrary characters (lone surrogates included).
PIECES = st.sampled_from(
    [
        *[
            "/",
            "..",
            ".",
            "\\",
            "\0",
            "\n",
            "C:",
            "~",
            "$(id)",
            ".git",
            "conftest.py",
            "nul",
            "\u202e",
            "e\u0301",
            "é",
            "ſ",
        ],
        *["proc/self/root", "items", "record.json", "content", " ", "-", "%2e%2e%2f", "\ud800", "\U000e0041"],
    ]
)
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=())), st.lists(st.one_of(PIECES, st.text(max_size=5))).map("".join)
)
WHOLESOME = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)


def accepted(name: str) -> bool:
    """Tell whether a name is accepted; any exception but the documented one is a failure of the test."""
    refused: RefusedError | None = None
    try:
        check_name(name)
    except RefusedError as error:
        refused = error
    if refused is None:
        return True
    assert refused.rule == "artifacts.name"
    assert refused.reason.isprintable()
    assert len(str(refused)) < 1000
    return False


@given(NAMES)
@example("a/../b")
@example("/etc/passwd")
@example("a\u0000b")
def test_an_accepted_name_stays_below_the_folder_it_is_joined_to(name: str) -> None:
    """The promise a later copy relies on, said independently of the rules: pure path arithmetic and Unicode."""
    if not accepted(name):
        return
    root = Path("/quarantine/copy")
    joined = root / name
    assert joined.is_relative_to(root)
    assert joined.parts[3:] == tuple(name.split("/"))
    assert not {".", "..", ""} & set(name.split("/"))
    assert not set("\\:\0") & set(name)
    assert name.isprintable()
    assert unicodedata.is_normalized("NFC", name)
    assert len(name.encode()) <= MAX_NAME_BYTES
    assert all(risk.isprintable() and len(risk) < 800 for risk in name_risks(name))


@given(NAMES)
def test_a_quoted_name_is_short_printable_ascii(name: str) -> None:
    """What a message repeats of a hostile name cannot forge a line or move a cursor."""
    shown = quoted(name).removesuffix("…")
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) < 700


@given(st.lists(WHOLESOME.map(lambda name: unicodedata.normalize("NFC", name)), max_size=8))
def test_no_two_accepted_names_of_a_call_are_equal_without_case(names: Sequence[str]) -> None:
    """Upper and lower case of an accepted name always collide with it, and a name alone never does."""
    for name in filter(accepted, names):
        call = CallNames()
        call.add(name)
        for other in {name, name.lower(), name.upper(), name.casefold()}:
            with pytest.raises(RefusedError):
                call.add(other)


@given(st.lists(st.binary()), NAMES)
def test_any_bytes_are_judged_the_same_however_they_are_cut(chunks: Sequence[bytes], name: str) -> None:
    """Never a crash, and the borders between chunks, which a program chooses, do not change the judgement."""
    cut, whole = Sniffer(), Sniffer()
    for chunk in chunks:
        cut.feed(chunk)
    whole.feed(b"".join(chunks))
    judged = whole.finish(name)
    assert cut.finish(name) == judged
    if judged.media_type.startswith("text/") or judged.media_type == "application/json":
        b"".join(chunks).decode()


@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X", b""]),
    st.binary(max_size=200),
    st.sampled_from(["image/png", "image/jpeg", "image/gif", "image/webp"]),
)
def test_any_image_header_is_a_number_or_nothing(start: bytes, rest: bytes, media_type: str) -> None:
    """No header makes the measurement crash or turn negative."""
    size = size_of(start + rest, media_type)
    assert size is None or min(size) >= 0


@given(st.lists(st.tuples(NAMES, st.binary(max_size=50)), max_size=4), NAMES)
@draws(60)
def test_whatever_the_names_the_store_stays_in_its_folder(sent: Sequence[tuple[str, bytes]], uri: str) -> None:
    """Real files: the only paths made are random ids, every kept byte comes back, the rest is refused."""

    async def run(home: Path) -> None:
        rules: set[str] = set()
        async with a_store(home / "state" / "q") as store:
            async with collector_of(store, a_call(), limits()) as collection:
                for name, data in sent:
                    try:
                        async with receiving(collection, name) as sink:
                            await sink.data(data)
                    except RefusedError as refused:
                        rules.add(refused.rule)
                kept = await collection.publish()
            assert rules <= {"artifacts.name"}
            for found in kept:
                assert (found.name, await content(store, found.uri)) in sent
            with pytest.raises(RefusedError) as unknown:
                await content(store, f"artifact://{uri}", ALICE)
            assert unknown.value.rule == "artifacts.unknown"
        expected: set[str] = set()
        for found in kept:
            expected |= {f"items/{found.id}/content", f"items/{found.id}/record.json"}
        there = {path for path in files(home) if not path.startswith("state/q/totals/")}
        assert there == {f"state/q/{path}" for path in expected}

    with tempfile.TemporaryDirectory() as home:
        anyio.run(run, Path(home))
