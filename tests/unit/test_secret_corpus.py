"""How well secrets are told from what only looks like them: a corpus, its rates, and what stands in their place."""

import base64
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, call
from urllib.parse import quote

import anyio.to_thread
import pytest
from tests.fixtures.channels import an_outcome
from tests.fixtures.secret_formats import PRECISION, RECALL, SETTINGS, filled, lengthened, wrong
from tests.fixtures.secret_formats import forms as documented
from tests.fixtures.secret_formats import rows as measured

from glovebox_sandboxes.contract.outcome import Blob, Captured, Outcome, OverlayChanges, Shown, SkippedFile
from glovebox_server.guards.redaction import guard as masking
from glovebox_server.guards.redaction import patterns
from glovebox_server.guards.redaction.detector import MAX_HELD, Forms, KeyMasker, derive_forms
from glovebox_server.guards.redaction.guard import (
    LOOP_BYTES,
    LiveOutput,
    mask_content,
    mask_outcome,
    mask_text,
    mask_value,
)
from glovebox_server.guards.redaction.patterns import MAX_KEY, MAX_PLACES, PATTERNS, find_secrets

ROOT = Path(__file__).parents[2]
RATES = (ROOT / "docs/operate/secret-rates.csv").read_text(encoding="utf-8").splitlines()
_CORPUS = tomllib.loads((ROOT / "tests" / "fixtures" / "secret_corpus.toml").read_text(encoding="utf-8"))
POSITIVES = [filled(each["text"]) for each in _CORPUS["positive"]]
_TOKEN = POSITIVES[0].partition("=")[2]
NEGATIVES = [filled(each["text"]) for each in _CORPUS["negative"]]
WRITTEN: Mapping[str, Callable[[str], str]] = {
    "as it is": str,
    "in JSON": lambda text: json.dumps({"output": text}),
    "in JSON in JSON": lambda text: json.dumps(json.dumps(text)),
    "numbered lines": lambda text: "\n".join(f"{n:4}  {line}" for n, line in enumerate(text.split("\n"), 1)),
    "percent-encoded": lambda text: quote(text, safe=""),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "hexadecimal": lambda text: text.encode().hex(),
    "backwards": lambda text: text[::-1],
}


def _finds(text: str) -> bool:
    count: Counter[str] = Counter()
    mask_text(f"first line\n{text}\nlast line\n", {}, count)
    return bool(count)


def test_the_rates_are_the_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, and compared with docs/operate/secret-rates.csv: better or worse, the table says it."""
    right, wrong = sum(map(_finds, POSITIVES)), sum(map(_finds, NEGATIVES))
    texts = f'corpus,Glovebox,"{len(POSITIVES)} secrets, {len(NEGATIVES)} near misses"'
    rows = [f"{texts},{right},{wrong},{right / (right + wrong):.2f},{right / len(POSITIVES):.2f}"]
    found = [text for text in POSITIVES if _finds(text)]
    rows += [
        f"written,{how},{len(found)},{sum(_finds(write(text)) for text in found)},,," for how, write in WRITTEN.items()
    ]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *rows, ""]))
    assert [row for row in rows if row not in RATES] == []


@pytest.mark.long
def test_documented_forms_are_found_also_lengthened_and_ordinary_text_is_left_alone() -> None:
    """The promised rates, on 3 MB of text; `make secrets` measures the rest, and the table has the rows."""
    lines, rates = measured()
    assert [line for line in lines if line.startswith("forms,") and line not in RATES] == []
    assert min(rates.values()) >= RECALL
    size, hits = wrong(3_000_000)
    right = rates["as documented"] * len(documented()) * len(SETTINGS)
    assert size > 3_000_000
    assert right / (right + len(hits)) >= PRECISION, hits


@pytest.mark.parametrize("filler", ["ghp_", "glpat-", "hvs.", "pypi-AgEIcHlwaS5vcmc"])
def test_a_word_of_a_token_over_and_over_costs_no_more_than_its_length(filler: str) -> None:
    """Letters looked at by a pattern are bounded at each place: twice the text is about twice the work, counted."""
    looked: list[int] = []
    for times in (500, 1000):
        data = f"{filler * times}example".encode()
        looked.append(sum(1 for _ in find_secrets(data)))
        assert all(end - start <= 1200 for start, end, _ in find_secrets(data))
    assert looked[1] <= 2 * looked[0] + 2


@pytest.mark.parametrize(
    "before",
    [
        "\x1b[32m", "\x1b[m", "\x1b[01;31m\x1b[K", "\x1b[38;5;208m", r"\x1b[1m", r"\u001b[0;31m",
        r"b'\x00", r"b'\xc3\xa9", r"\u0027", r"\u003D", r"a\n", "%3D",
        "\r\x1b[2K", "\x1b[5C", "\x1b[1;1H", "\x1b[H\x1b[J", "\x1b[?25h", "\x1b(B", "\ud800",
    ],
)  # fmt: skip
def test_a_token_behind_a_colour_or_an_escape_is_replaced(before: str) -> None:
    """In a result, and live where the output comes in two at any place; a letter before it makes it another word."""
    token = "ghp_" + "b7Qx2Lm9Wc4Zk1Vt8Rn5Hy3Df6Gs0Pj2Aa1E"
    text = f"{before}{token}\x1b[0m\n"
    assert mask_text(text, {}, Counter()) == f"{before}[secret: GitHub token]\x1b[0m\n"
    for at in range(len(text)):
        seen: list[str] = []
        show = LiveOutput(seen.append, dict)
        show(text[:at])
        show(text[at:])
        assert token not in "".join(seen), at
    assert mask_text(f"x{token}", {}, Counter()) == f"x{token}"


def test_no_near_miss_is_touched_and_each_kind_has_a_positive() -> None:
    """Each comes out as it went in; of the patterns none is without one."""
    assert [text for text in NEGATIVES if mask_text(text, {}, Counter()) != text] == []
    count: Counter[str] = Counter()
    for text in (*POSITIVES, *map(filled, documented().values())):
        mask_text(text, {}, count)
    assert {each.kind for each in PATTERNS} == set(count)


def test_nothing_of_a_secret_is_left() -> None:
    """The made-up letters of what is found are gone, all lines of a private key too; what stands around stays."""
    for text in filter(_finds, POSITIVES):
        clean = mask_text(f"first line\n{text}\nlast line\n", {}, Counter())
        assert clean.startswith("first line\n")
        assert clean.endswith("\nlast line\n")
        assert "[secret: " in clean
        if "AccessKeyId" not in text:  # beside it stands a session token, which opens nothing without the key
            assert not re.search(r"(?<![a-z])[A-Za-z0-9+/]{30,}", clean.replace("_", "")), clean


def test_a_private_key_is_replaced_to_its_last_line_or_as_far_as_it_goes() -> None:
    """The prose after it stays, also where the last line is farther away than a key is long."""
    head, line = "-----BEGIN RSA PRIV" + "ATE KEY-----\n", "Ab3+" * 16 + "\n"
    last = head.strip().replace("BEGIN", "END")
    for lines, rest in ((1, "and so on"), (3, "And so on."), (3, ". " * MAX_KEY + last), (0, line[:39])):
        wanted = f"[secret: private key]\n{rest}" if lines else head + rest
        assert mask_text(head + line * lines + rest, {}, Counter()) == wanted
        if lines:
            assert mask_text(f"{head}{line * lines}=a b=\n{last}\n{rest}", {}, Counter()) == wanted


def _all_over(text: str, padding: int) -> Outcome:
    """What has a text in each part that a program can write."""
    printed = Captured(text="." * padding + text, total_bytes=7, dropped_bytes=0)
    copy = Shown(name="a", reason=text)
    return an_outcome(
        stdout=printed, stderr=printed, value={"text": text, text: [text, 1, None]}, shown=(copy,),
        skipped=(SkippedFile(name=text, reason="a"), SkippedFile(name="b", reason=text)),
        blobs=(Blob(media_type="image/png", data=b"a"), Blob(media_type="image/png", data=b"b", shown=copy)),
        changes=OverlayChanges(created=("a", text), changed=(text,), deleted=(text, "b"), counts={}, patch=True),
    )  # fmt: skip


@pytest.mark.parametrize("padding", [0, LOOP_BYTES])
async def test_every_text_of_an_outcome_is_looked_at_and_counted(padding: int) -> None:
    """On the event loop and in a thread; what holds nothing is the same object as before."""
    clean, count = await mask_outcome(_all_over(_TOKEN, padding), {})
    assert (clean, count) == (_all_over("[secret: GitHub token]", padding), {"GitHub token": 12})
    plain = _all_over("nothing", padding)
    assert (await mask_outcome(plain, {}))[0] is plain


async def test_values_that_the_server_holds_are_replaced_however_they_are_written() -> None:
    """In base64, hex, percent-encoding, spaced, spread; another value and the next text come as they are (controls)."""
    value, other = "q7Zk2mX9vB4tR8wLp3Ns", "q7Zk2mX9vB4tR8wLp3Nt"
    known = derive_forms("of the server", value)
    for text in (value, base64.b64encode(value.encode()).decode(), value.encode().hex(), " ".join(value)):
        clean, count = await mask_outcome(an_outcome(f"né {text} né"), known)
        assert count == {"credential of the server": 1}
        assert clean.stdout.text.startswith("né [credential of the server]")
        assert clean.stdout.text.endswith(" né")
    same, count = await mask_outcome(an_outcome(other), known)
    assert (same.stdout.text, count) == (other, {})
    texts = [value[:15] + " " * (MAX_HELD + 1) + value[15:], value[:15], value[15:] + " and so on", value]
    clean, count = await mask_outcome(an_outcome(value=texts), known)
    replaced = "[credential of the server]"
    assert (clean.value, count) == ([replaced, texts[1], texts[2], replaced], {"credential of the server": 2})


def test_a_flood_of_words_is_bounded_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many places that must be looked around, the rest is withheld; the control is one place less."""
    flood = "PRIVATE KEY " * (MAX_PLACES + 10) + POSITIVES[20]
    count: Counter[str] = Counter()
    clean = mask_text(flood, {}, count)
    assert count
    assert POSITIVES[20][40:80] not in clean
    many = "\n".join([POSITIVES[0]] * 10_000)
    assert POSITIVES[0][-20:] not in mask_text(many, {}, Counter())
    monkeypatch.setattr(patterns, "MAX_PLACES", 20)
    assert list(find_secrets(b"PRIVATE KEY " * 20)) == []
    assert list(find_secrets(b"PRIVATE KEY " * 21)) == [(20 * 12 - 96, 21 * 12, "private key")]


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_what_is_shown_live_holds_no_secret_wherever_writes_are_cut(size: int) -> None:
    """Each of the corpus that is found, in pieces; the control is that ordinary lines are shown."""
    for text in filter(_finds, POSITIVES):
        shown: list[str] = []
        show = LiveOutput(shown.append, dict)
        whole = f"begin\n{text}\nend\n"
        for at in range(0, len(whole), size):
            show(whole[at : at + size])
        live = "".join(shown)
        assert _finds(text)
        assert not _finds(live), text
        assert live.startswith("begin\n") or size == 10_000
    for form in filter(None, map(lengthened, documented().values())) if size == 7 else ():
        token, parts = filled(form), list[str]()
        show = LiveOutput(parts.append, dict)
        for at in range(0, len(token) + 1, size):
            show(f"{token}\n"[at : at + size])
        assert token[-12:] not in "".join(parts) or not _finds(token), token
    plain: list[str] = []
    show = LiveOutput(plain.append, dict)
    for piece in ("step 1", " of 2\n", "50%\r"):
        show(piece)
    assert "".join(plain) == "step 1 of 2\n50%\r"


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_live_output_ends_at_a_key_and_says_so_and_not_at_words_like_it(size: int) -> None:
    """Where a key of several lines begins; continents and prose about keys are shown."""
    harmless = filled("ASIA/Tokyo EURASIA AKIAH ASIA\nNo PRIVATE KEY was found.\nXAK{}IA{C16}\n" + "! " * 20 + "\n")
    key = next(text for text in POSITIVES if "RSA PRIV" in text)
    for ending, secret in (("", "\0"), (key, key.split("\n")[1]), (filled("id AK{}IA{C16}\n"), " AKIA")):
        shown: list[str] = []
        show = LiveOutput(shown.append, dict)
        for at in range(0, len(harmless), size):
            show(harmless[at : at + size])
        for at in range(0, len(ending), size):
            show(ending[at : at + size])
        live = "".join(shown)
        assert live.startswith(harmless)
        assert live.endswith("[the rest is shown when the program ends]\n") is bool(ending)
        assert secret not in live.removeprefix(harmless)


def test_a_value_that_is_lent_while_a_program_runs_is_shown_by_it_no_more() -> None:
    """From then on, also where some of the line was held back before; the control is what came before it."""
    value, lent = "q7Zk2mX9vB4tR8wLp3Ns", list[str]()
    known = [derive_forms("of the server", value)]
    shown: list[str] = []
    show = LiveOutput(shown.append, lambda: known[0] if lent else {})
    show(f"{value} \n{value}")
    lent.append(value)
    show(f" \n{value} naïve\n" + "é b\n" * 256)
    assert "".join(shown).startswith(f"{value} \n[credential of the server] \n[credential of the server] naïve\né ")


async def _masked(redact: str, forms: Forms, on_secret: masking.SecretHook | None = None, *observers: object) -> Any:
    """An attempt of a caller with a credential, of whose call the guard has the masking."""
    now = SimpleNamespace(wrap_live=[], transforms=[], redacted=Counter(), observers=observers, withheld=None)
    now.profile, now.rights = SimpleNamespace(result=SimpleNamespace(redact=redact)), SimpleNamespace(credentials=(1,))
    call = SimpleNamespace(now=now, request="request")
    await masking.mask(lambda rights: forms if rights is now.rights else {}, on_secret, cast("Any", call))
    return now


async def test_nothing_is_shown_live_where_secrets_have_a_result_refused() -> None:
    """Nor at the end, which is refused with what was found; the control is a profile that has them masked."""
    for redact, seen in (("refuse", []), ("mask", ["text\n"])):
        shown: list[str] = []
        now = await _masked(redact, {})
        show = now.wrap_live[0](shown.append)
        show("text\n")
        await now.transforms[0](an_outcome("text"), True)
        assert (shown, now.withheld) == (seen, None)
        assert now.mask_name(_TOKEN) == "[secret: GitHub token]"
        await now.transforms[0](an_outcome(_TOKEN, value=[POSITIVES[20]]), True)
        assert now.redacted == {"GitHub token": 2, "private key": 1}
        if redact == "refuse":
            assert now.withheld.rule == "result.redact"
            assert "(GitHub token × 2, private key)" in now.withheld.reason
            assert now.withheld.hint
        else:
            assert now.withheld is None


@pytest.mark.parametrize(
    ("stdout", "value", "observers", "heard"),
    [
        (_TOKEN, None, (), True),
        (_TOKEN, None, ("look",), False),
        ("text", ["a" * 16], (), True),
        ("a" * 16, {"a" * 15: 1}, (), False),
    ],
    ids=["a secret", "which an observer has scanned", "a text that may begin one", "none that may"],
)
async def test_rules_hear_of_raw_output_that_may_hold_a_secret_and_that_nothing_else_scanned(
    stdout: str, value: object, observers: tuple[object, ...], heard: bool
) -> None:
    hook, outcome = AsyncMock(), an_outcome(stdout, value=value)
    now = await _masked("mask", derive_forms("of the server", "a" * 16), hook, *observers)
    now.rights.credentials = ()  # so that nothing is looked up of keys
    clean = await now.transforms[0](outcome, True)
    assert (_TOKEN in str(clean), clean.value) == (False, value)
    assert hook.await_args_list == [call("request", outcome)] * heard


async def test_a_normal_end_of_live_output_releases_its_rest() -> None:
    """Without secrets in it; what began a private key shows nothing more."""
    value = "q7Zk2mX9vB4tR8wLp3Ns"
    texts = {
        f"a {value[:9]}": f"a {value[:9]}",
        f"a {value} é": "a [credential of the server] é",
        "a -----BEGIN RSA PRIVATE KEY-----\nMII": "\n[the rest is shown when the program ends]\n",
    }
    for text, rest in texts.items():
        shown: list[str] = []
        now = await _masked("mask", derive_forms("of the server", value))
        now.wrap_live[0](shown.append)(text)
        assert shown == []
        await now.transforms[0](an_outcome(), False)
        assert shown == []
        await now.transforms[0](an_outcome(), True)
        assert "".join(shown) == rest


async def test_a_private_key_with_a_text_for_each_line_is_replaced() -> None:
    """As searching with context gives it, numbered, and as a program's list; what is no line of it stays."""
    lines = next(text for text in POSITIVES if "RSA PRIV" in text).split("\n")
    body = [line for line in lines if re.fullmatch(r"[A-Za-z0-9+/=]{16,}", line)]
    assert len(body) == 3
    others = ["src/keys/deployment", "Makefile", "a sentence of Several words", "short"]
    numbered = [f"{n}: {line}" for n, line in enumerate(lines)]
    for value in (
        {"matches": [{"path": others[0], "text": lines[0], "before": others, "after": lines[1:]}]},
        [*others, *lines],
        [*others, *numbered],
    ):
        clean, count = await mask_outcome(an_outcome(value=value), {})
        assert [line for line in body if line in json.dumps(clean.value)] == []
        assert count == {"private key": len(body)}
        assert str(clean.value).count("'[secret: private key]'") == len(body)
        assert [each for each in others if json.dumps(each) not in json.dumps(clean.value)] == []
    without = [line for line in lines if "PRIVATE" not in line]
    assert await mask_value(without, {}) == (without, {})
    assert (await mask_outcome(an_outcome(value=without), {}))[0].value == without


async def test_what_takes_long_is_in_a_thread_however_it_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many empty texts, numbers, keys: told without going through them all; and the table is made once."""
    known, made, threads = derive_forms("of the server", "q7Zk2mX9vB4tR8wLp3Ns"), list[object](), list[object]()

    class Counted(KeyMasker):
        def __init__(self, wanted: Forms) -> None:
            made.append(wanted)
            super().__init__(wanted)

    async def run_sync(work: Callable[..., object], *given: object) -> object:
        threads.append(work)
        return work(*given)

    monkeypatch.setattr(masking, "KeyMasker", Counted)
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    large: list[object] = [[""] * 32_000, [0] * 32_000, [[]] * 32_000, {str(n): 0 for n in range(32_000)}]
    for value in large:
        plain = an_outcome(value=value)
        assert (await mask_outcome(plain, known))[0] is plain
        assert (await mask_value(value, known))[1] == {}
    assert len(threads) == len(made) == 2 * len(large)
    assert (await mask_value(["text"] * 100, known))[1] == {}
    assert (await mask_value({"text": "q7Zk2mX9vB4tR8wLp3Ns"}, known))[1] == {"credential of the server": 1}
    assert len(threads) == 2 * len(large)
    assert len(made) == 2 * len(large) + 2


async def test_of_a_file_that_is_no_text_all_but_its_secrets_stays() -> None:
    """The control is one without: it is the same object as before."""
    content = b"\xff\xfe " + _TOKEN.encode() + b" \xc3"
    assert await mask_content(content, {}) == (b"\xff\xfe [secret: GitHub token] \xc3", {"GitHub token": 1})
    plain = b"\xff" * 30
    assert (await mask_content(plain, {}))[0] is plain


def test_a_token_begins_with_one_of_its_words_in_which_a_dot_is_a_dot() -> None:
    found = patterns._token("kind", "ab.|c-", patterns._run(b"0-9", 3))
    assert (found.kind, found.words, found.begins, found.unbroken) == ("kind", (b"ab.", b"c-"), True, True)
    texts = (b"ab.123", b"c-1234", b"abx123", b"c-12", b"xc-123", b"c-123x")
    assert [text for text in texts if found.form.search(text)] == [b"ab.123", b"c-1234"]
    assert not patterns._of("kind", "a", b"a").unbroken


async def test_keys_that_are_replaced_alike_stay_as_many() -> None:
    """Of a JSON object; what stands under each is kept."""
    token = POSITIVES[0].partition("=")[2]
    value, _ = await mask_value({token: 1, token[:-1] + "x": 2, "other": 3}, {})
    assert value == {"[secret: GitHub token]": 1, "[secret: GitHub token] (2)": 2, "other": 3}
