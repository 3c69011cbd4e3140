"""What a job hands back, when the process that writes it is hostile."""

import json
import time
from typing import Any

import pytest

from _glovebox_guest.pictures.header import MAX_EDGE
from _glovebox_guest.program.emit import BLOB, HEADER, SHOWN, VALUE
from glovebox_sandboxes.contract.outcome import Blob, Shown
from glovebox_sandboxes.contract.pictures import IMAGE_TYPES, MAX_BYTES
from glovebox_sandboxes.session.run import MAX_BLOB, MAX_BLOB_BYTES, MAX_BLOBS, MAX_VALUE, ResultReader

PNG = IMAGE_TYPES["image/png"] + b"rest"


def frame(kind: int, payload: bytes) -> bytes:
    """A frame as ``_glovebox_guest.program.emit`` writes it."""
    return HEADER.pack(kind, len(payload)) + payload


def value(body: Any) -> bytes:
    """A frame with a value."""
    return frame(VALUE, json.dumps(body).encode())


def read(*data: bytes) -> ResultReader:
    """A reader after these bytes."""
    reader = ResultReader()
    for each in data:
        reader.feed(each)
    return reader


def test_values_and_pictures_are_read() -> None:
    """The control: one value, and pictures before and after it."""
    picture = frame(BLOB, b"image/png\0" + PNG)
    reader = read(picture, value({"a": 1}), picture)
    assert reader.value == {"a": 1}
    assert reader.blobs == [Blob(media_type="image/png", data=PNG)] * 2
    assert reader.problems == []


def png(width: int, height: int, length: int = 40) -> bytes:
    """A PNG as far as its header goes."""
    head = PNG[:8] + b"\0\0\0\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return head.ljust(length, b"\0")


def copy(data: bytes = b"", **about: Any) -> bytes:
    """A frame with a smaller copy."""
    return frame(SHOWN, json.dumps(about).encode() + b"\0" + data)


def test_a_copy_belongs_to_the_picture_before_it_or_to_the_file_it_names() -> None:
    """And says of itself only what its own header says."""
    small, about = png(20, 10), {"media_type": "image/png", "of": [2000, 1000]}
    reader = read(
        frame(BLOB, b"image/png\0" + PNG), copy(small, name="", **about), copy(small, name="a.png", **about),
        copy(name="b.png", reason="it is broken"),
    )  # fmt: skip
    shown = Shown(name="", media_type="image/png", data=small, size=(20, 10), of=(2000, 1000))
    assert reader.blobs == [Blob(media_type="image/png", data=PNG, shown=shown)]
    assert [(each.name, each.size, each.reason) for each in reader.shown] == [
        ("a.png", (20, 10), ""),
        ("b.png", (0, 0), "it is broken"),
    ]
    assert reader.problems == []


def test_a_copy_of_a_picture_that_was_left_out_is_no_other_pictures() -> None:
    """The second picture has no room: its copy stands alone. The control is the one of the first."""
    large, small = PNG + bytes(MAX_BLOB - 100), png(20, 10)
    about = {"name": "", "media_type": "image/png", "of": [2000, 1000]}
    blobs = [frame(BLOB, b"image/png\0" + large), copy(small, **about)]
    reader = read(*blobs, *blobs, *blobs)
    assert [blob.shown is not None for blob in reader.blobs] == [True, True]
    assert [each.data for each in reader.shown] == [small]


@pytest.mark.parametrize(
    ("data", "about"),
    [
        (png(20, 10), {"media_type": "image/jpeg"}),
        (png(MAX_EDGE + 1, 10), {}),
        (png(0, 10), {}),
        (png(20, 10, MAX_BYTES + 1), {}),
        (PNG, {}),
        (b"", {}),
        (png(20, 10), {"reason": "and a reason"}),
        (png(20, 10), {"name": "\x1b[2J"}),
        (png(20, 10), {"name": "x" * 513}),
        (png(20, 10), {"of": [0, 10]}),
        (png(20, 10), {"of": [1 << 40, 10]}),
        (png(20, 10), {"of": ["1", 10]}),
        (png(20, 10), {"more": 1}),
        (png(20, 10), {"name": 1}),
    ],
)
def test_a_copy_that_is_none_is_left_out(data: bytes, about: dict[str, Any]) -> None:
    """Of another type, larger than clients take, or described in other words. Control: the same in order."""
    said = {"name": "a.png", "media_type": "image/png", "of": [2000, 1000]}
    reader = read(copy(data, **said | about))
    assert (reader.shown, len(reader.problems)) == ([], 1)
    assert len(read(copy(png(20, 10), **said)).shown) == 1


def test_a_second_value_is_never_read() -> None:
    """The shipped attack: 60 forged values of 1 MiB of arrays took 12 seconds to read. Now none of them is read."""
    # The first is refused by its bytes, and the second ends the reading; a value of ordinary size is the control.
    forged = frame(VALUE, b"[" + b"[]," * ((MAX_VALUE - 8) // 3) + b"0]")
    reader = ResultReader()
    began = time.process_time()
    for _ in range(60):
        reader.feed(forged)
    spent = time.process_time() - began
    assert spent < 0.1
    assert reader.value is None
    assert not reader._buffer
    assert [problem.split(";")[0] for problem in reader.problems] == [
        "the value is not JSON of ordinary size",
        "the program wrote to the descriptor its results go through",
    ]
    assert read(value([[]] * 10_000), value(2)).value == [[]] * 10_000


def test_the_longest_answers_of_jobs_pass() -> None:
    """A table of 10,000 rows in a text, and a search's 1,000 matches with five lines before and after each."""
    table = {"value": "\n".join(f"{n}, {n * n}, [{n}]" for n in range(10_000))}
    assert read(value(table)).value == table
    match = {"path": "a", "line": 1, "text": "x", "before": ["x"] * 5, "after": ["x"] * 5}
    assert read(value({"matches": [match] * 1000})).value == {"matches": [match] * 1000}


@pytest.mark.parametrize("kind", [0, 1, ord("X"), 255])
def test_an_unknown_frame_ends_the_reading(kind: int) -> None:
    """What came before counts, what comes after is never looked at, and nothing is held."""
    reader = read(value(1), frame(kind, b"x"), value(2))
    assert reader.value == 1
    assert len(reader.problems) == 1
    assert not reader._buffer


@pytest.mark.parametrize(("kind", "most"), [(VALUE, MAX_VALUE), (BLOB, MAX_BLOB)])
def test_a_false_length_is_not_waited_for(kind: int, most: int) -> None:
    """Beyond the limit nothing is held; at the limit the payload is awaited."""
    assert "the rest is dropped" in read(HEADER.pack(kind, most + 1)).problems[0]
    assert read(HEADER.pack(kind, most)).problems == []


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'{"a":-1e400}', b"\xff", b"[" * 200_000, b"9" * 5000,
     b'"\xed\xa0\x80"', '"x"'.encode("utf-16"), b'\xef\xbb\xbf"x"'],
)  # fmt: skip
def test_what_is_no_json_is_no_value(payload: bytes) -> None:
    """Also what Python's reader would take, and what would be infinite when it is written again."""
    reader = read(frame(VALUE, payload))
    assert reader.value is None
    assert reader.problems == ["the value is not JSON of ordinary size"]


@pytest.mark.parametrize("body", ["\ud800", {"\udfff": ["a\udc00b"]}, [["\ud83d"]]])
def test_half_a_character_becomes_a_question_mark(body: Any) -> None:
    """A program's ``repr`` may hold lone surrogates, which no message and no log could carry."""
    reader = read(value(body))
    assert "?" in json.dumps(reader.value, ensure_ascii=False).encode().decode()
    assert read(value("\U0001f600 é \\u")).value == "\U0001f600 é \\u"  # the control: a pair is one character


@pytest.mark.parametrize(
    "payload", [b"", PNG, b"image/png", b"image/png\0", b"image/png\0GIF8", b"text/html\0<b>", b"IMAGE/PNG\0" + PNG,
                b"image/svg+xml\0<svg/>", b"\xff\0" + PNG]
)  # fmt: skip
def test_a_picture_is_what_it_claims_to_be(payload: bytes) -> None:
    """By a short list of types and their first bytes."""
    reader = read(frame(BLOB, payload))
    assert reader.blobs == []
    assert reader.problems == ["a picture is not of the type it claims"]


def test_pictures_and_copies_are_bounded() -> None:
    """MAX_BLOBS, the first ones; too many bytes together; one more copy than a job may have ends the reading."""
    reader = read(*(frame(BLOB, b"image/png\0" + PNG + bytes([n])) for n in range(MAX_BLOBS + 3)))
    assert [blob.data[-1] for blob in reader.blobs] == list(range(MAX_BLOBS))
    assert len(reader.problems) == 1
    large = frame(BLOB, b"image/png\0" + PNG + bytes(MAX_BLOB - 100))
    small = frame(BLOB, b"image/png\0" + PNG)
    reader = read(large, large, large, small)
    assert sum(len(blob.data) for blob in reader.blobs) <= MAX_BLOB_BYTES
    assert [len(blob.data) > 100 for blob in reader.blobs] == [True, True, False]
    frames = copy(png(20, 10), name="a.png", media_type="image/png", of=[2000, 1000]) * (MAX_BLOBS + 1)
    reader = read(frames)
    assert (len(reader.shown), len(reader.problems)) == (MAX_BLOBS, 1)


@pytest.mark.parametrize("kind", [VALUE, BLOB])
def test_a_flood_of_tiny_frames_is_not_read(kind: int) -> None:
    """Five bytes each for the program, a parse and a complaint each for us: a few, and no more."""
    reader = read(frame(kind, b"") * 100_000)
    assert len(reader.problems) <= MAX_BLOBS + 1
    assert not reader._buffer
    before = list(reader.problems)
    reader.feed(frame(kind, b"1") * 100_000)
    assert reader.problems == before
    assert reader.value is None


def test_a_picture_that_is_left_out_is_not_held() -> None:
    """However its bytes come; what follows it is read."""
    large = frame(BLOB, b"image/png\0" + PNG + bytes(MAX_BLOB - 100))
    reader = read(large, large[:-1])
    reader.feed(large[-1:])
    for at in range(0, len(large), 100_000):
        reader.feed(large[at : at + 100_000])
        assert len(reader._buffer) <= HEADER.size
    reader.feed(value("after"))
    assert (reader.value, len(reader.blobs)) == ("after", 2)
