"""What stands in for a lent value in an answer: however it is cut, and without telling a program what it guessed."""

import base64
import codecs
import itertools
import string
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glovebox_server.egress.credentials.redact import MAX_HELD, UNKNOWN, Redactor, ValueSpread, _standing, forms
from glovebox_server.governance.watch.markers import squeezed

KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0+/e"
GITHUB = "ghp_" + "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3Df6Gs0Pj2Aa1E"
SIGNS = "p+9/Q=r&2<S>t'7\"u`W+4/x=8&Yz6Ab3Cd5"
LATE = "Zq8fk2Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0wJ+/=&<>'\"`Kd5"
"""Its signs come late: its many ways of being escaped begin alike."""
KEYS = (LATE, KEY, GITHUB, "abcdefghijklmnop", "7" * 16, "--a-b-c-d-e-f-g-h-i-j-k-l-m-n-o-p--", SIGNS)
ALL = (*forms("t", KEY), *forms("t", GITHUB))


def passed(pieces: Sequence[bytes], *values: str) -> bytes:
    """What comes of a text in pieces."""
    wanted = {form: its for value in values for form, its in forms("tracker", value).items()}
    redactor = Redactor(wanted)
    return b"".join([*(redactor.feed(piece) for piece in pieces), redactor.finish()])


@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.integers(0, 200).map(lambda at: ALL[at % len(ALL)]),
            st.sampled_from([KEY.encode(), GITHUB.encode(), KEY[:20].encode(), GITHUB[5:].encode()]),
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
)
def test_however_an_answer_is_cut_nothing_but_beginnings_gets_through(parts: list[bytes], cuts: list[int]) -> None:
    """No form of either value is in what comes; what is whole in one piece leaves no beginning either."""
    text = b"".join(parts)
    at = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    came = passed([text[first:end] for first, end in itertools.pairwise(at)], KEY, GITHUB)
    assert not any(form in squeezed(came.replace(b"[credential tracker]", b"[]")) for form in ALL)
    if not any(form in squeezed(text) for form in ALL):
        assert came == text


@pytest.mark.parametrize("value", KEYS)
def test_every_form_is_replaced_whole_and_byte_by_byte(value: str) -> None:
    """Bytes around it come as they are; in single bytes fewer letters than ``least`` leave before it."""
    for form, its in forms("tracker", value).items():
        assert passed([b"<" + form + b">"], value).startswith(b"<[credential tracker]")
        came = passed([b"<", *(form[at : at + 1] for at in range(len(form))), b">"], value)
        assert form not in squeezed(came)
        before = came.partition(b"[credential tracker]")[0]
        assert len(squeezed(before)) < its.least, (form, came)


@pytest.mark.parametrize("value", [KEY, GITHUB])
def test_a_guess_of_a_beginning_does_not_show(value: str) -> None:
    """An honest server repeats what a program sends: right and wrong letters must leave in the same way.

    The control: from ``least`` on, which is twelve characters that nobody knows, they do not.
    """
    wanted = forms("tracker", value)
    for form, its in wanted.items():
        for size in range(1, its.least):
            guess = form[:size]
            wrong = guess[:-1] + (b"0" if guess[-1:] != b"0" else b"1")
            for each in (guess, wrong):
                redactor = Redactor(wanted)
                assert redactor.feed(b"you said " + each) == b"you said " + each
                assert redactor.feed(b" " * (MAX_HELD + 1)) == b" " * (MAX_HELD + 1)
        redactor = Redactor(wanted)
        assert redactor.feed(b"you said " + form[: its.least]).endswith(b"you said ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Zq8+fk2/Lw7Rt5Xv9Bn3Mp6Hs1==", written)
        for written in (
            r"Zq8\u002Bfk2/Lw7Rt5Xv9Bn3Mp6Hs1==",  # JSON that is safe in a page
            r"Zq8\x2Bfk2\x2FLw7Rt5Xv9Bn3Mp6Hs1\x3D\x3D",  # a script
            "Zq8&#43;fk2/Lw7Rt5Xv9Bn3Mp6Hs1==",  # templates, each with a list of its own
            "Zq8+fk2&#x2F;Lw7Rt5Xv9Bn3Mp6Hs1==",
            "Zq8+fk2&#x2F;Lw7Rt5Xv9Bn3Mp6Hs1&#x3D;&#x3D;",
            "Zq8%2Bfk2/Lw7Rt5Xv9Bn3Mp6Hs1%3D%3D",  # a path
        )
    ]
    + [
        ("Zq8&fk2<Lw7\"Rt5'Xv9+Bn3Mp6Hs1", written)
        for written in (
            r"Zq8\u0026fk2\u003CLw7\"Rt5'Xv9+Bn3Mp6Hs1",
            r"Zq8\u0026fk2\u003CLw7\u0022Rt5\u0027Xv9\u002BBn3Mp6Hs1",
            "Zq8&amp;fk2&lt;Lw7&#34;Rt5&#39;Xv9&#43;Bn3Mp6Hs1",
            "Zq8&amp;fk2&lt;Lw7&#34;Rt5&#39;Xv9+Bn3Mp6Hs1",
            "Zq8&amp;fk2&lt;Lw7&quot;Rt5&#39;Xv9+Bn3Mp6Hs1",
            "Zq8&#38;fk2&#60;Lw7&#34;Rt5&#39;Xv9+Bn3Mp6Hs1",
        )
    ],
)
def test_a_value_of_which_an_encoder_escapes_some_signs_is_replaced(value: str, text: str) -> None:
    """Whole and cut anywhere; the control is one letter different."""
    for cut in range(len(text)):
        came = passed([text[:cut].encode(), text[cut:].encode()], value)
        assert b"[credential tracker]" in came, (cut, came)
        assert b"p6hs1" not in squeezed(came), (cut, came)
    alike = text.replace("Hs1", "Hx1").encode()
    assert passed([alike], value) == alike


def test_what_is_public_of_a_key_is_no_part_of_what_has_to_be_guessed() -> None:
    """``ghp_`` is known to all: the characters that count come behind it."""
    assert forms("t", GITHUB)[squeezed(GITHUB.encode())].least == len("ghp") + UNKNOWN
    hexadecimal = squeezed(GITHUB.encode().hex().encode())
    assert forms("t", GITHUB)[hexadecimal].least == 2 * (len("ghp_") + UNKNOWN)


def test_a_value_spread_over_too_much_ends_the_answer() -> None:
    """And one that is not spread so far comes replaced."""
    half = len(KEY) // 2 + 4
    assert passed([KEY[:half].encode(), b" " * 1000, KEY[half:].encode()], KEY) == b"[credential tracker]"
    redactor = Redactor(forms("tracker", KEY))
    assert redactor.feed(KEY[:half].encode()) == b""
    with pytest.raises(ValueSpread):
        redactor.feed(b" " * MAX_HELD)


def test_of_two_values_that_share_letters_neither_comes() -> None:
    """One inside the other, one behind the other, and one value that two credentials name."""
    inner, outer = "q8Zr5Tn2Lk9Vb4Wm7", "Start1234567890abc" + "q8Zr5Tn2Lk9Vb4Wm7" + "End0987654321xyz"
    came = passed([outer[:20].encode(), outer[20:].encode(), b"!"], inner, outer)
    assert "Start1234567890abc" not in came.decode()
    assert b"End0987654321xyz" not in came
    assert passed([(KEY + GITHUB + KEY).encode()], KEY, GITHUB) == b"[credential tracker]" * 3


def test_a_text_that_only_looks_like_a_value_comes_as_it_is() -> None:
    """Nearly all of it, and then another letter."""
    alike = KEY[:-1] + "x"
    for size in (1, 3, 1000):
        text = (alike + " ").encode() * 5
        assert passed([text[at : at + size] for at in range(0, len(text), size)], KEY) == text


def test_a_server_that_sends_single_bytes_has_each_looked_at_once() -> None:
    """Counted, not timed: while 60,000 bytes are held, a blank more finds no place of any letter anew."""
    redactor = Redactor(forms("tracker", KEY))
    redactor.feed(KEY[:30].encode() + b" " * 60_000)
    for _ in range(100):
        assert redactor.feed(b" ") == b""
        assert len(redactor._text) <= len(KEY)
    letters = string.ascii_letters.encode()
    assert redactor.feed(letters) == KEY[:30].encode() + b" " * 60_100 + letters


class Counted(bytes):
    """Letters that count how often somebody looks for something in them."""

    looks = 0

    def find(self, *given: Any) -> int:
        """Count, and look."""
        self.looks += 1
        return super().find(*given)


@pytest.mark.parametrize("value", [KEY, GITHUB, SIGNS, LATE])
def test_a_server_that_repeats_how_a_value_begins_takes_no_more_time(value: str) -> None:
    """Counted, not timed: in 16 KiB of any beginning a form is looked for at most 24 times. The control: the value."""
    every = forms("tracker", value)
    for form in every:
        for size in (15, 16, 29, 30, 31, len(form) // 2, len(form) - 1):
            text = Counted((form[:size] * (16_384 // size + 1))[:16_384])
            for each in every:
                text.looks = 0
                whole = [end for _, end in _standing(text, each, 0) if end <= len(text)]
                assert bool(whole) == (each in bytes(text))
                assert whole or text.looks <= 24, (form, size, each)
    text = Counted(squeezed(value.encode()) * 100)
    assert len(list(_standing(text, squeezed(value.encode()), 0))) == 100
    assert text.looks > 200


@pytest.mark.parametrize("value", [KEY, GITHUB])
def test_what_the_docs_say_of_encodings_is_so(value: str) -> None:
    """Those that are replaced, and those that cannot be: a server that wants to tell the key can."""
    data = value.encode()
    entities = "".join(f"&#{byte};" for byte in data)
    replaced = {
        "swapped": value.swapcase().encode(), "backwards": data[::-1], "rot13": codecs.encode(value, "rot13").encode(),
        "base64 of base64": base64.b64encode(base64.b64encode(data)), "base32": base64.b32encode(data),
        "hex": data.hex().encode(), "base64 of hex": base64.b64encode(data.hex().encode()),
        "UTF-7": value.encode("utf-7"), "UTF-16": value.encode("utf-16"), "UTF-32": value.encode("utf-32"),
        "percent twice": "".join(f"%25{byte:02x}" for byte in data).encode(), "entities": entities.encode(),
        "JSON": "".join(f"\\u{byte:04x}" for byte in data).encode(), "zero width": "\u200b".join(value).encode(),
        "decimal": str(list(data)).encode(), "octal": "".join(f"\\{byte:03o}" for byte in data).encode(),
    }  # fmt: skip
    told = {
        "base64 thrice": base64.b64encode(base64.b64encode(base64.b64encode(data))),
        "hex of hex": data.hex().encode().hex().encode(), "hex backwards": data.hex()[::-1].encode(),
        "base85": base64.b85encode(data), "base32hex": base64.b32hexencode(data), "packed": zlib.compress(data),
        "letters between": "x".join(value).encode(), "every second escaped": "".join(
            each if at % 2 else f"&#{ord(each)};" for at, each in enumerate(value)
        ).encode(), "enciphered": bytes(byte ^ 0x55 for byte in data),
    }  # fmt: skip
    assert {name for name, text in replaced.items() if passed([text], value) == text} == set()
    assert {name for name, text in told.items() if passed([text], value) != text} == set()
