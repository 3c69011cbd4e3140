"""Head and tail of a stream, with an exact count of the gap."""

from glovebox_sandboxes.session.run import HeadAndTail


def captured(limit: int, *chunks: bytes) -> tuple[str, int, int]:
    kept = HeadAndTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    result = kept.captured()
    return result.text, result.total_bytes, result.dropped_bytes


def test_what_fits_is_kept_whole_and_one_byte_too_many_is_a_gap_of_one() -> None:
    assert captured(4, b"abcde") == ("ab\n[… 1 bytes left out …]\nde", 5, 1)
    assert captured(10) == ("", 0, 0)
    assert captured(10, b"0123456789") == ("0123456789", 10, 0)
    assert captured(4, b"a\xc3", b"\xa9b") == ("aéb", 4, 0)
    assert captured(10, b"\xff\x00a") == ("\ufffd\x00a", 3, 0)
    assert captured(4, b"\xc3\xa9\xc3\xa9\xc3") == ("é\n[… 1 bytes left out …]\n\ufffd\ufffd", 5, 1)
