"""What stands in for an injected key: however the text is cut, and with no reaction to a part of the key."""

import base64
import codecs
import itertools
import random
import string
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from glovebox_server.guards.redaction import detector
from glovebox_server.guards.redaction.detector import MAX_HELD, Forms, KeyMasker, derive_forms, find_all, squeeze
from glovebox_server.guards.redaction.guard import LiveOutput, mask_content, mask_text

KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0+/e"
GITHUB = "ghp_" + "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3Df6Gs0Pj2Aa1E"
SIGNS = "p+9/Q=r&2<S>t'7\"u`W+4/x=8&Yz6Ab3Cd5"
LATE = "Zq8fk2Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0wJ+/=&<>'\"`Kd5"
"""Its signs come late: its many ways of being escaped begin alike."""
KEYS = (LATE, KEY, GITHUB, "abcdefghijklmnop", "7" * 16, "--a-b-c-d-e-f-g-h-i-j-k-l-m-n-o-p--", SIGNS)
ALL = (*derive_forms("t", KEY), *derive_forms("t", GITHUB))


def passed(pieces: Sequence[bytes], *values: str) -> bytes:
    wanted = {form: name for value in values for form, name in derive_forms("tracker", value).items()}
    redactor = KeyMasker(wanted)
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
def test_however_an_answer_is_cut_no_key_gets_through(parts: list[bytes], cuts: list[int]) -> None:
    """No form of either value is in what comes, which is the same in one piece; without a form it is all there."""
    text = b"".join(parts)
    at = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    came = passed([text[first:end] for first, end in itertools.pairwise(at)], KEY, GITHUB)
    assert not any(form in squeeze(came.replace(b"[credential tracker]", b"[]")) for form in ALL)
    assert came == passed([text], KEY, GITHUB)
    if not any(form in squeeze(text) for form in ALL):
        assert came == text


@pytest.mark.long
@pytest.mark.parametrize("value", KEYS)
def test_every_form_is_replaced_whole_and_byte_by_byte(value: str) -> None:
    """Bytes around it come as they are, and nothing of it; the control is a form without its last letter."""
    for form in derive_forms("tracker", value):
        for pieces in ([b"<" + form + b">"], [b"<", *(form[at : at + 1] for at in range(len(form))), b">"]):
            assert passed(pieces, value) == b"<[credential tracker]>"
        near = b"<" + form[:-1] + b">"
        assert passed([near], value) == near or any(other in form[:-1] for other in derive_forms("tracker", value))


#: Two keys of one length and kind each, of which everything but the end may be known: it is public, or was guessed.
PAIRS = {
    "JWT": tuple(
        f"eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJ1c2VyLTEifQ.{end}"
        for end in ("dBjftJeZ4CVPmB92K27uhbUJU1p1r", "dBjftJeZ4CVPmB92K27uhbUJU1-_w")
    ),
    "Basic": tuple(base64.b64encode(f"service-account:{end}".encode()).decode() for end in ("hunter2pw", "hunter2+=")),
    "sk_live_": ("sk_" + "live_4eC39HqLyjWDarjtT1zdp7dc", "sk_" + "live_4eC39HqLyjWDarjtT1zdp7_-"),
    "xoxb-": ("xoxb" + "-123456789012-1234567890123-Ab3dEfGh", "xoxb" + "-123456789012-1234567890123-Ab3d+/='"),
    "connection string": tuple(
        f"postgres://app:{end}@db.example.org/main" for end in ("s3cretPassw0rd", "s3cretPas&<'+\"")
    ),
    "signs": (LATE, "Q" * len(LATE)),
}
WRITINGS: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "hex": lambda text: text.encode().hex().encode(),
    "base64": lambda text: base64.b64encode(text.encode()).rstrip(b"="),
    "case-folded": lambda text: text.upper().encode(),
    "split": lambda text: "\r\n ".join(text).encode(),
}


def observed(wanted: Forms, pieces: Sequence[bytes]) -> object:
    """All that shows of a text in pieces: what each piece releases, what is shown live, a result and its counts."""
    redactor, live, counts = KeyMasker(wanted), list[str](), Counter[str]()
    released = [redactor.feed(piece) for piece in pieces]
    show = LiveOutput(live.append, lambda: wanted)
    texts = [piece.decode("latin-1") for piece in pieces]
    for text in texts:
        show(text)
    return released, redactor.finish(), live, mask_text("".join(texts), wanted, counts), counts


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_no_part_of_a_key_shows_in_anything(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What contains neither of two keys of one length is treated alike; what contains one is not (the control)."""
    monkeypatch.setattr(detector, "MAX_HELD", 2000)
    chosen, tables = random.Random(21), [derive_forms("tracker", key) for key in pair]  # noqa: S311 - the same each time
    every = [form for table in tables for form in table]
    tried = 0
    while tried < 60:
        form = chosen.choice(every)
        parts = [form[:-1], form[1:], form[: len(form) // 2], form[:20], b" " * 900, chosen.randbytes(20)]
        text = b"".join(chosen.choices(parts, k=5))
        if any(form in squeeze(text) for form in every):
            continue
        tried += 1
        size = chosen.choice([17, 100, 1000])
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        first, second = (observed(table, pieces) for table in tables)
        assert first == second
    first, second = (observed(table, [pair[0].encode(), b" " * 3000]) for table in tables)
    assert first != second


class Beginnings:
    """The rule that a program could ask: what may begin a key, from 12 of its letters on, is withheld. The control."""

    def __init__(self, wanted: Forms) -> None:
        self._wanted = wanted

    def feed(self, data: bytes) -> bytes:
        text = squeeze(data)
        held = [n for form in self._wanted for n in range(12, len(form)) if text.endswith(form[:n])]
        return data[: len(data) - max(held, default=0)]


def guessed(key: str, known: str, write: Callable[[str], bytes], make: Callable[[Forms], Any]) -> str:
    """Return how far a program comes that knows a key's beginning, and has a server repeat each next character."""
    wanted = derive_forms("tracker", key)
    while len(known) < len(key) - 1:  # a whole guess may show
        reactions = {
            sign: make(wanted).feed(write(known + sign)).endswith(write(known + sign)[-1:])
            for sign in string.ascii_letters + string.digits
        }
        shown = Counter(reactions.values())
        if len(shown) == 1:
            return known
        known += min(reactions, key=lambda sign: shown[reactions[sign]])
    return known


@pytest.mark.long
@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_program_that_guesses_from_what_is_public_fails(pair: tuple[str, str], write: Callable[[str], bytes]) -> None:
    """However it writes its guess; the control of a plain one, against the former rule, comes on."""
    for key in pair:
        known = key[: len(key) - 9]
        assert guessed(key, known, write, KeyMasker) == known
    if write is str.encode:
        assert len(guessed(pair[0].lower(), pair[0].lower()[:-9], write, Beginnings)) > len(pair[0]) - 9


@given(value=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=16, max_size=80))
def test_how_much_is_withheld_depends_on_a_key_s_length_alone(value: str) -> None:
    """The longest way of writing has nine letters for each character, whatever the characters are."""
    assume(sum(map(str.isalnum, value)) >= 16 and len(set(squeeze(value.encode()))) > 2)
    assert max(map(len, derive_forms("tracker", value))) == 9 * len(value)
    letters = 1 << (9 * len(value) - 1).bit_length()
    redactor = KeyMasker(derive_forms("tracker", value))
    assert redactor.feed(b"!" * letters) == b"!" * letters
    assert redactor.feed(b"~" + b"07" * (letters // 2)) == b"~"
    assert redactor.feed(b"07. ") == b"07"


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
        assert b"p6hs1" not in squeeze(came), (cut, came)
    alike = text.replace("Hs1", "Hx1").encode()
    assert passed([alike], value) == alike


def test_a_stream_withholds_no_more_than_it_may_and_a_complete_text_is_searched_whole() -> None:
    """What exceeds it is released, so a key that is spread so far passes; the control is one that is spread less."""
    half = len(KEY) // 2
    first, second = KEY[:half].encode(), KEY[half:].encode()
    assert passed([first, b" " * 60_000, second], KEY) == b"[credential tracker]"
    redactor = KeyMasker(derive_forms("tracker", KEY))
    assert redactor.feed(first) == b""
    assert redactor.feed(b" " * MAX_HELD) == first
    assert redactor.feed(second) + redactor.finish() == b" " * MAX_HELD + second
    redactor = KeyMasker(derive_forms("tracker", KEY))
    spread = KEY[:9] + "é" * MAX_HELD + KEY[9:]
    assert redactor.whole(f"\ud800{spread}>") == "\ud800[credential tracker]>"
    assert redactor.whole(KEY[:-1]) + redactor.whole(KEY[-1] * 20) == KEY[:-1] + KEY[-1] * 20


async def test_a_key_within_its_own_replacement_is_counted() -> None:
    """A count of none would have the text shown as it was, and kept from a profile that refuses such results."""
    text = f"[credential {KEY[:3]}]{KEY[3:]}"
    assert await mask_content(text.encode(), derive_forms("tracker", KEY)) == (
        b"[credential [credential tracker]",
        {"credential of the server": 1},
    )


def test_of_two_values_that_share_letters_neither_comes_and_what_looks_like_one_does() -> None:
    """One inside the other, one behind the other, one that two credentials name; nearly all of it."""
    inner, outer = "q8Zr5Tn2Lk9Vb4Wm7", "Start1234567890abc" + "q8Zr5Tn2Lk9Vb4Wm7" + "End0987654321xyz"
    came = passed([outer[:20].encode(), outer[20:].encode(), b"!"], inner, outer)
    assert "Start1234567890abc" not in came.decode()
    assert b"End0987654321xyz" not in came
    assert passed([(KEY + GITHUB + KEY).encode()], KEY, GITHUB) == b"[credential tracker]" * 3
    alike = KEY[:-1] + "x"
    for size in (1, 3, 1000):
        text = (alike + " ").encode() * 5
        assert passed([text[at : at + size] for at in range(0, len(text), size)], KEY) == text


def test_a_server_that_sends_single_bytes_has_each_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: while 60,000 bytes are withheld, a letter more has one letter searched."""
    redactor, searched = KeyMasker(derive_forms("tracker", KEY)), list[int]()
    redactor.feed(b"x" * 512 + b" " * 60_000)

    def spans(_text: bytes, letters: int) -> list[tuple[int, int, str]]:
        searched.append(letters)
        return []

    monkeypatch.setattr(redactor._index, "spans", spans)
    for _ in range(100):
        assert redactor.feed(b"y") == b"x"
    assert searched == [1] * 100


class Counted(bytes):
    looks = 0

    def find(self, *given: Any) -> int:
        self.looks += 1
        return super().find(*given)


@pytest.mark.long
@pytest.mark.parametrize("value", [KEY, GITHUB, SIGNS, LATE])
def test_a_server_that_repeats_how_a_value_begins_takes_no_more_time(value: str) -> None:
    """Counted, not timed: in 4 KiB of any beginning a form is searched at most 8 times. The control: the value."""
    every = derive_forms("tracker", value)
    for form in every:
        for size in (15, 16, 29, 30, 31, len(form) // 2, len(form) - 1):
            text = Counted((form[:size] * (4_096 // size + 1))[:4_096])
            for each in every:
                text.looks = 0
                whole = list(find_all(text, each, len(text)))
                assert bool(whole) == (each in bytes(text))
                assert whole or text.looks <= 8, (form, size, each)
    form = squeeze(value.encode())
    assert [list(find_all(b"x" + form, form, letters)) for letters in (1, 2)] == [[], [(1, 1 + len(form))]]
    text = Counted(form * 100)
    assert len(list(find_all(text, form, len(text)))) == 100
    assert text.looks > 100


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
