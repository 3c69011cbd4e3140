"""What only a secret looks like: patterns of high precision, each behind a word that it cannot be without. Pure.

The forms are those that the services document; a form that other things have too, such as forty characters of base64
alone, is not here. What documentation prints as an example says so of itself, and is none.
A program chooses the text: no pattern repeats alternatives, since one text could be read by them in ever more ways.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_WORDS: Final = 64
"""Places at which one word is looked at: a program may print nothing but that word."""
_BEFORE: Final = 96
_AFTER: Final = 700
"""Bytes around the word in which the secret lies."""
MAX_PLACES: Final = 4096
"""Places at which a word that its secret does not begin with is looked at; what comes after them is not known."""
MAX_KEY: Final = 16 * 1024
"""Bytes of a private key, from its first line to its last: one of 16,384 bits has 12,600."""
_SHORTEST: Final = 24
"""No secret of these kinds is shorter."""
_BEGINS: Final = (
    rb"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    rb"|(?<=[0-9][A-HJKSTfhlm])|(?<=(?<![A-Za-z0-9_])[BHJKm]))"
)
"""Not within a word, but for one that an encoded sign, an escape or the end of a terminal's code only makes."""
_ENDS: Final = rb"(?![A-Za-z0-9_\-])"
_EXAMPLE: Final = re.compile(rb"(?i)example|xxxx|\.\.\.|placeholder|redacted|0{12}|1234567890")
"""In a match: somebody explains, and does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One kind of secret."""

    kind: str
    """What it is, for the record."""
    words: tuple[bytes, ...]
    """One of these is in every match: a search for them costs next to nothing."""
    form: re.Pattern[bytes]
    """The whole of it."""
    begins: bool
    """Whether it begins with the word."""


def _of(kind: str, words: str, form: bytes, *, begins: bool = True) -> Pattern:
    return Pattern(
        kind=kind, words=tuple(word.encode() for word in words.split("|")), form=re.compile(form), begins=begins
    )


def _token(kind: str, words: str, rest: bytes) -> Pattern:
    """A kind that begins with one of these words, and no other letters before it."""
    return _of(kind, words, _BEGINS + rb"(?:" + words.encode().replace(b".", rb"\.") + rb")" + rest + _ENDS)


PATTERNS: Final[tuple[Pattern, ...]] = (
    _of(
        "private key",
        "PRIVATE KEY",
        rb"-----BEGIN (?:[A-Z0-9]{2,16} )?PRIVATE KEY(?: BLOCK)?-----[^-]{0,640}?[A-Za-z0-9+/=]{40}",
        begins=False,
    ),
    _of(
        "AWS access key with its secret",
        "AKIA|ASIA",
        rb"(?<![A-Z0-9])A(?:KIA|SIA)[A-Z2-7]{16}(?![A-Z0-9])"
        rb"[^\0]{1,160}?(?<![A-Za-z0-9/+=])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    _of("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", _BEGINS + rb"gh[pousr]_[A-Za-z0-9]{36}" + _ENDS),
    _of("GitHub token", "github_pat_", _BEGINS + rb"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}" + _ENDS),
    _of("GitLab token", "glpat-", _BEGINS + rb"glpat-[A-Za-z0-9_\-]{20}" + _ENDS),
    _of(
        "Slack token",
        "xoxb-|xoxp-|xoxa-",
        _BEGINS + rb"xox[abp]-[0-9]{10,13}-[0-9]{10,13}-[A-Za-z0-9\-]{20,80}" + _ENDS,
    ),
    _of("Stripe key", "sk_live_|rk_live_", _BEGINS + rb"[sr]k_live_[A-Za-z0-9]{24,99}" + _ENDS),
    _of("Google API key", "AIza", _BEGINS + rb"AIza[A-Za-z0-9_\-]{35}" + _ENDS),
    _of("npm token", "npm_", _BEGINS + rb"npm_[A-Za-z0-9]{36}" + _ENDS),
    _of("PyPI token", "pypi-AgEIcHlwaS5vcmc", _BEGINS + rb"pypi-AgEIcHlwaS5vcmc[A-Za-z0-9_\-]{50,200}"),
    _of("Anthropic key", "sk-ant-", _BEGINS + rb"sk-ant-[a-z]{3,6}[0-9]{2}-[A-Za-z0-9_\-]{80,120}"),
    _of(
        "OpenAI key",
        "T3BlbkFJ",
        _BEGINS + rb"sk-(?:proj-|svcacct-)?[A-Za-z0-9_\-]{20,80}T3BlbkFJ[A-Za-z0-9_\-]{20,80}",
        begins=False,
    ),
    _of(
        "AWS secret key",
        "aws_secret_access_key|AWS_SECRET_ACCESS_KEY|SecretAccessKey|secretAccessKey",
        rb"[A-Za-z_]{15,21}[\"']?\s{0,4}[=:]\s{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    _token("Slack app token", "xapp-", rb"[0-9]-[A-Z0-9]{9,13}-[0-9]{10,15}-[a-f0-9]{64}"),
    _of(
        "Slack webhook",
        "hooks.slack.com/services/",
        rb"hooks\.slack\.com/services/T[A-Z0-9]{8,12}/B[A-Z0-9]{8,12}/[A-Za-z0-9]{24}" + _ENDS,
    ),
    _token("SendGrid key", "SG.", rb"[A-Za-z0-9_\-]{22}\.[A-Za-z0-9_\-]{43}"),
    _token("Hugging Face token", "hf_", rb"[A-Za-z]{34}"),
    _token("DigitalOcean token", "dop_v1_|doo_v1_|dor_v1_", rb"[a-f0-9]{64}"),
    _token("Docker token", "dckr_pat_", rb"[A-Za-z0-9_\-]{27}"),
    _token("Databricks token", "dapi", rb"[a-f0-9]{32}"),
    _token("Grafana token", "glsa_", rb"[A-Za-z0-9]{32}_[a-f0-9]{8}"),
    _token("Shopify token", "shpat_|shpss_|shpca_", rb"[a-f0-9]{32}"),
    _token("Linear key", "lin_api_", rb"[A-Za-z0-9]{40}"),
    _token("Postman key", "PMAK-", rb"[a-f0-9]{24}-[a-f0-9]{34}"),
    _token("New Relic key", "NRAK-", rb"[A-Z0-9]{27}"),
    _token("Doppler token", "dp.pt.", rb"[A-Za-z0-9]{43}"),
    _token("Vault token", "hvs.", rb"[A-Za-z0-9_\-]{90,120}"),
    _token("age key", "AGE-SECRET-KEY-1", rb"[02-9AC-HJ-NP-Z]{58}"),
    _of("Azure storage key", "AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}=="),
)


def kind_of_secret(data: bytes) -> str | None:
    """The kind of a secret in it; None where there is none. Of each word only the first ``MAX_WORDS`` are looked at."""
    if len(data) < _SHORTEST:
        return None
    for pattern in PATTERNS:
        for word in pattern.words:
            at = data.find(word)
            for _ in range(MAX_WORDS):
                if at < 0:
                    break
                match = pattern.form.search(data, max(0, at - _BEFORE), at + _AFTER)
                if match is not None and not _EXAMPLE.search(match[0]):
                    return pattern.kind
                at = data.find(word, at + len(word))
    return None


_LAST_LINE: Final = re.compile(rb"-----END [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_BODY_LINE: Final = re.compile(rb"(?:\\[rn]|\s)*[A-Za-z0-9+/=]{16,}")


def found(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield where each secret begins and ends, and its kind, in no order; some may overlap.

    After ``MAX_PLACES`` of a word that is looked around, the rest of the data counts as one: it is not known.
    """
    if len(data) < _SHORTEST:
        return
    for pattern in PATTERNS:
        for word in pattern.words:
            at, places = data.find(word), 0
            while at >= 0:
                if pattern.begins:
                    match = pattern.form.match(data, at)
                elif places == MAX_PLACES:
                    yield max(0, at - _BEFORE), len(data), pattern.kind
                    break
                else:
                    places += 1
                    match = pattern.form.search(data, max(0, at - _BEFORE), at + _AFTER)
                after = at + len(word)
                if match is not None and not _EXAMPLE.search(match[0]):
                    end = _end_of_key(data, match) if word == b"PRIVATE KEY" else match.end()
                    yield match.start(), end, pattern.kind
                    after = max(after, end)
                at = data.find(word, after)


def _end_of_key(data: bytes, match: re.Match[bytes]) -> int:
    """Where a private key ends: with its last line, or, where that is missing, with the last of its letters."""
    last = _LAST_LINE.search(data, match.end(), match.start() + MAX_KEY)
    if last is not None:
        return last.end()
    at = match.end()
    while at < len(data) and (line := _BODY_LINE.match(data, at)) is not None and line.end() > at:
        at = line.end()
    return at
