"""JSON from strangers has one meaning or none."""

import json
from unittest.mock import Mock

import pytest

from glovebox_sandboxes import strict_json


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
        ('{"a":' * 65, "deeper than 64"),
        ('{"a":' * 100_000, "more than 8192 values"),
        ("[" * 33 + '{"a":' * 32 + "0" + "}" * 32 + "]" * 33, "deeper than 64"),
        ("[" + "[]," * 8_192 + "0]", "more than 8192 values"),
        ('{"' + '":0,"'.join(f"{n}" for n in range(20_000)) + '":0}', "more than 8192 values"),
        ("[" + '"",' * 349_000 + "0]", "more than 8192 values"),
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


PROGRAM = "x = [1, 2, {'a': (3, 4)}]; y = {7: [8, 9]}\n" * 2500


@pytest.mark.parametrize(
    "value",
    [{"code": PROGRAM}, {"code": PROGRAM.replace("'", '"')}, {"code": "\\" * 100_001 + "[," * 20_000},
     [[]] * 4_000, {f"k{n}": n for n in range(4_000)}],
    ids=["program", "quotes", "backslashes", "arrays", "keys"],
)  # fmt: skip
def test_what_callers_send_is_within_the_bounds(value: object) -> None:
    """The control: 100 kB of program with thousands of brackets and commas are one value."""
    assert strict_json.check(json.dumps(value)) == value


def test_a_body_of_arrays_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped attack: 1 MiB of nested arrays took 0.6 s to read, and all others waited. Nothing is made of it."""
    monkeypatch.setattr(json, "loads", read := Mock(wraps=json.loads))
    with pytest.raises(ValueError, match="more than 8192 values"):
        strict_json.check(b"[" + b"[[[[]]]]," * 116_000 + b"0]")
    read.assert_not_called()
    assert strict_json.check(b"[" + b"[[[[]]]]," * 1_000 + b"0]")[:2] == [[[[[]]]]] * 2
    read.assert_called_once()
