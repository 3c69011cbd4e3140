"""A job's result frames: the same however they are cut, bounded, and nothing that JSON could not carry on."""

import json

from tests.fuzz.harness import pieces

from glovebox_sandboxes.session.run import MAX_BLOB_BYTES, MAX_BLOBS, MAX_VALUE, ResultReader


def _read(data: bytes, size: int) -> ResultReader:
    reader = ResultReader()
    for piece in pieces(data, size):
        reader.feed(piece)
    return reader


def check(data: bytes) -> None:
    """First byte: the size of pieces."""
    if not data:
        return
    whole, cut = _read(data[1:], 0), _read(data[1:], data[0])
    assert (whole.value, whole.blobs, whole.shown) == (cut.value, cut.blobs, cut.shown)
    assert whole.problems == cut.problems
    assert len(json.dumps(whole.value, ensure_ascii=False, allow_nan=False).encode()) <= 8 * MAX_VALUE
    assert len(whole.blobs) <= MAX_BLOBS
    assert sum(len(blob.data) for blob in whole.blobs) <= MAX_BLOB_BYTES
    assert len(whole.problems) <= MAX_BLOBS + 2
