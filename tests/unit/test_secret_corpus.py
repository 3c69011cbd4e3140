"""How well secrets are told from what only looks like them: a corpus, its rates, and what stands in their place."""

import base64
import json
import random
import re
import string
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from glovebox_sandboxes.contract.outcome import Captured, Outcome, Usage
from glovebox_server.egress.credentials.redact import forms
from glovebox_server.secret_scan.patterns import MAX_PLACES, PATTERNS
from glovebox_server.secret_scan.redact import LOOP_BYTES, redacted, shown_live, text_redacted

ROOT = Path(__file__).parents[2]
_LETTERS = {
    "A": string.ascii_letters + string.digits,
    "W": string.ascii_letters,
    "H": "0123456789abcdef",
    "D": string.digits,
    "U": string.ascii_uppercase + string.digits,
    "C": string.ascii_uppercase + "234567",
    "B": string.ascii_letters + string.digits + "+/",
    "Q": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    "S": string.ascii_letters + string.digits + "-_",
}


def _filled(text: str) -> str:
    made = random.Random(text)  # noqa: S311 - the same in each run

    def letters(match: re.Match[str]) -> str:
        # The last is no sign: a token's end must not depend on chance.
        some = made.choices(_LETTERS[match[1]], k=int(match[2]) - 1)
        return "".join(some) + made.choice([each for each in _LETTERS[match[1]] if each.isalnum()])

    return re.sub(r"\{([AWHDUCBQS])(\d+)\}", letters, text).replace("{}", "")


_CORPUS = tomllib.loads((ROOT / "tests" / "fixtures" / "secret_corpus.toml").read_text(encoding="utf-8"))
POSITIVES = [_filled(each["text"]) for each in _CORPUS["positive"]]
NEGATIVES = [_filled(each["text"]) for each in _CORPUS["negative"]]
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
    text_redacted(f"first line\n{text}\nlast line\n", {}, count)
    return bool(count)


def test_the_rates_are_those_that_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, and compared with docs/operate/secrets.md: better or worse, the page says it."""
    right, wrong = sum(map(_finds, POSITIVES)), sum(map(_finds, NEGATIVES))
    counts = f"| {len(POSITIVES)} secrets, {len(NEGATIVES)} near misses | {right} | {wrong} |"
    rows = [f"{counts} {right / (right + wrong):.2f} | {right / len(POSITIVES):.2f} |"]
    found = [text for text in POSITIVES if _finds(text)]
    rows += [
        f"| {how} | {sum(_finds(write(text)) for text in found)} of {len(found)} |" for how, write in WRITTEN.items()
    ]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *rows, ""]))
    page = (ROOT / "docs" / "operate" / "secrets.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []


def test_no_near_miss_is_touched() -> None:
    """Each comes out as it went in."""
    assert [text for text in NEGATIVES if text_redacted(text, {}, Counter()) != text] == []


def test_nothing_of_a_secret_is_left() -> None:
    """The made-up letters of what is found are gone, all lines of a private key too; what stands around stays."""
    for text in filter(_finds, POSITIVES):
        clean = text_redacted(f"first line\n{text}\nlast line\n", {}, Counter())
        assert clean.startswith("first line\n")
        assert clean.endswith("\nlast line\n")
        assert "[secret: " in clean
        if "AccessKeyId" not in text:  # beside it stands a session token, which opens nothing without the key
            assert not re.search(r"(?<![a-z])[A-Za-z0-9+/]{30,}", clean.replace("_", "")), clean


@pytest.mark.parametrize("cut", [40, 100, 200])
def test_a_private_key_that_is_cut_off_is_replaced_as_far_as_it_goes(cut: int) -> None:
    """Without its last line; the prose after it stays."""
    key = next(text for text in POSITIVES if "RSA PRIV" in text)
    clean = text_redacted(f"{key[: 32 + cut]}\n", {}, Counter())
    assert cut == 40 or clean.startswith("[secret: private key]")
    assert text_redacted(f"{key[:170]}\nAnd so on.", {}, Counter()).endswith("\nAnd so on.") or cut < 200


def _outcome(stdout: str, value: object = None) -> Outcome:
    def captured(text: str) -> Captured:
        return Captured(text=text, total_bytes=len(text), dropped_bytes=0)

    return Outcome(
        ended="exited", code=0, reason="", stdout=captured(stdout), stderr=captured(""), value=value, blobs=(),
        skipped=(), usage=Usage(wall_ms=1.0, cpu_ms=None, memory_peak_bytes=0),
    )  # fmt: skip


@pytest.mark.parametrize("padding", [0, LOOP_BYTES])
async def test_every_text_of_an_outcome_is_looked_at_and_counted(padding: int) -> None:
    """On the event loop and in a thread; what holds nothing is the same object as before."""
    token = POSITIVES[0]
    outcome = _outcome("." * padding + token, {"text": token, token: [token, 1, None]})
    clean, count = await redacted(outcome, {})
    assert count == {"GitHub token": 4}
    assert token not in str(clean)
    plain = _outcome("." * padding, {"text": "nothing"})
    assert (await redacted(plain, {}))[0] is plain


async def test_values_that_the_server_holds_are_replaced_however_they_are_written() -> None:
    """As they are, in base64, hex, percent-encoding and spaced; the control is another value."""
    value, other = "q7Zk2mX9vB4tR8wLp3Ns", "q7Zk2mX9vB4tR8wLp3Nt"
    known = forms("of the server", value)
    for text in (value, base64.b64encode(value.encode()).decode(), value.encode().hex(), " ".join(value)):
        clean, count = await redacted(_outcome(f"né {text} né"), known)
        assert count == {"credential of the server": 1}
        assert clean.stdout.text.startswith("né [credential of the server]")
        assert clean.stdout.text.endswith(" né")
    same, count = await redacted(_outcome(other), known)
    assert (same.stdout.text, count) == (other, {})


def test_a_flood_of_words_is_bounded_and_hides_nothing() -> None:
    """After so many places that must be looked around, the rest is withheld."""
    flood = "PRIVATE KEY " * (MAX_PLACES + 10) + POSITIVES[20]
    began = time.process_time()
    count: Counter[str] = Counter()
    clean = text_redacted(flood, {}, count)
    assert time.process_time() - began < 2
    assert count
    assert POSITIVES[20][40:80] not in clean
    many = "\n".join([POSITIVES[0]] * 10_000)
    assert POSITIVES[0][-20:] not in text_redacted(many, {}, Counter())


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_what_is_shown_live_holds_no_secret_wherever_writes_are_cut(size: int) -> None:
    """Each of the corpus that is found, in pieces; the control is that ordinary lines are shown."""
    for text in filter(_finds, POSITIVES):
        shown: list[str] = []
        show = shown_live(shown.append, "mask", {})
        whole = f"begin\n{text}\nend\n"
        for at in range(0, len(whole), size):
            show(whole[at : at + size])
        live = "".join(shown)
        assert _finds(text)
        assert not _finds(live), text
        assert live.startswith("begin\n") or size == 10_000
    plain: list[str] = []
    show = shown_live(plain.append, "mask", {})
    for piece in ("step 1", " of 2\n", "50%\r"):
        show(piece)
    assert "".join(plain) == "step 1 of 2\n50%\r"
    nothing: list[str] = []
    shown_live(nothing.append, "refuse", {})("text\n")
    assert nothing == []
    everything: list[str] = []
    shown_live(everything.append, "none", {})(POSITIVES[0])
    assert everything == [POSITIVES[0]]


def test_each_kind_has_a_positive() -> None:
    """Of the patterns none is without one."""
    count: Counter[str] = Counter()
    for text in POSITIVES:
        text_redacted(text, {}, count)
    assert {each.kind for each in PATTERNS} == set(count)
