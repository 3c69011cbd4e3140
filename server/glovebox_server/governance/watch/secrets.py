"""What only a secret looks like: patterns of high precision, each behind a word that it cannot be without. Pure.

The forms are those that the services document; a form that other things have too, such as forty characters of base64
alone, is not here. What documentation prints as an example says so of itself, and is none.
A program chooses the text: no pattern repeats alternatives, since one text could be read by them in ever more ways.
"""

import re
from dataclasses import dataclass
from typing import Final

MAX_WORDS: Final = 64
"""Places at which one word is looked at: a program may print nothing but that word."""
_BEFORE: Final = 96
_AFTER: Final = 700
"""Bytes around the word in which the secret lies."""
_SHORTEST: Final = 24
"""No secret of these kinds is shorter."""
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


def _of(kind: str, words: str, form: bytes) -> Pattern:
    return Pattern(kind=kind, words=tuple(word.encode() for word in words.split("|")), form=re.compile(form))


PATTERNS: Final[tuple[Pattern, ...]] = (
    _of(
        "private key",
        "PRIVATE KEY",
        rb"-----BEGIN (?:[A-Z0-9]{2,16} )?PRIVATE KEY(?: BLOCK)?-----[^-]{0,640}?[A-Za-z0-9+/=]{40}",
    ),
    _of(
        "AWS access key with its secret",
        "AKIA|ASIA",
        rb"(?<![A-Z0-9])A(?:KIA|SIA)[A-Z2-7]{16}(?![A-Z0-9])"
        rb"[^\0]{1,160}?(?<![A-Za-z0-9/+=])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    _of("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", rb"\bgh[pousr]_[A-Za-z0-9]{36}" + _ENDS),
    _of("GitHub token", "github_pat_", rb"\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}" + _ENDS),
    _of("GitLab token", "glpat-", rb"\bglpat-[A-Za-z0-9_\-]{20}" + _ENDS),
    _of("Slack token", "xoxb-|xoxp-|xoxa-", rb"\bxox[abp]-[0-9]{10,13}-[0-9]{10,13}-[A-Za-z0-9\-]{20,80}" + _ENDS),
    _of("Stripe key", "sk_live_|rk_live_", rb"\b[sr]k_live_[A-Za-z0-9]{24,99}" + _ENDS),
    _of("Google API key", "AIza", rb"\bAIza[A-Za-z0-9_\-]{35}" + _ENDS),
    _of("npm token", "npm_", rb"\bnpm_[A-Za-z0-9]{36}" + _ENDS),
    _of("PyPI token", "pypi-AgEIcHlwaS5vcmc", rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_\-]{50,200}"),
    _of("Anthropic key", "sk-ant-", rb"\bsk-ant-[a-z]{3,6}[0-9]{2}-[A-Za-z0-9_\-]{80,120}"),
    _of("OpenAI key", "T3BlbkFJ", rb"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_\-]{20,80}T3BlbkFJ[A-Za-z0-9_\-]{20,80}"),
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
