"""JSON from strangers has one meaning or none."""

import json

import pytest

from glovebox_server import strict_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":1,"a":2}', "same key twice"),
        ('[{"a":{"b":1,"b":1}}]', "same key twice"),
        ('{"\\u0061":1,"a":2}', "same key twice"),
        ("1e400", "range of a double"),
        ("-1e400", "range of a double"),
        ("9" * 400, "range of a double"),
        ("NaN", "NaN"),
        ("[-Infinity]", "NaN"),
        ('"\\ud800"', "surrogate"),
        ('{"\\udc00":1}', "surrogate"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ("[" * 100_000, "deeper than 64"),
        ('{"a":' * 100_000, "deeper than 64"),
        ("", "not JSON"),
        ("{} x", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_readers_could_disagree_about_is_refused(text: str | bytes, reason: str) -> None:
    """M5: each is refused for the stated reason, and the message does not repeat the text."""
    with pytest.raises(ValueError, match=reason):
        strict_json.check(text)


@pytest.mark.parametrize(
    "text", ['{"a":1,"b":{"a":2}}', "1e308", "9007199254740993", '"\\ud83d\\ude00"', "[" * 64 + "]" * 64, '"é"', "null"]
)
def test_sound_json_means_what_it_says(text: str) -> None:
    """The control: the nearest sound neighbours are taken as they are."""
    assert strict_json.check(text) == json.loads(text)
    assert strict_json.check(text.encode()) == json.loads(text)
