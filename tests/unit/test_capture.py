"""Head and tail of a stream, with an exact count of the gap."""

import pytest

from glovebox_sandboxes.session.run import HeadAndTail


def captured(limit: int, *chunks: bytes) -> tuple[str, int, int]:
    kept = HeadAndTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    result = kept.captured()
    return result.text, result.total_bytes, result.dropped_bytes


def test_what_fits_is_kept_whole() -> None:
    assert captured(10) == ("", 0, 0)
    assert captured(10, b"0123456789") == ("0123456789", 10, 0)
    assert captured(4, b"a\xc3", b"\xa9b") == ("aéb", 4, 0)


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_the_gap_is_counted_exactly(size: int) -> None:
    data = b"abcdefghijklmnopqrst"
    chunks = [data[at : at + size] for at in range(0, 20, size)]
    assert captured(6, *chunks) == ("abc\n[… 14 bytes left out …]\nrst", 20, 14)


def test_one_byte_too_many_is_a_gap_of_one() -> None:
    assert captured(4, b"abcde") == ("ab\n[… 1 bytes left out …]\nde", 5, 1)


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert captured(10, b"\xff\x00a") == ("\ufffd\x00a", 3, 0)
    assert captured(4, b"\xc3\xa9\xc3\xa9\xc3") == ("é\n[… 1 bytes left out …]\n\ufffd\ufffd", 5, 1)


def test_ten_gigabytes_would_hold_no_more_than_the_limit() -> None:
    """Shown with 64 MiB: what is held does not grow with what came."""
    kept = HeadAndTail(1000)
    chunk = bytes(256 * 1024)
    for _ in range(256):
        kept.feed(chunk)
    assert len(kept._tail) <= 1000
    assert kept.captured().dropped_bytes == 256 * len(chunk) - 1000
