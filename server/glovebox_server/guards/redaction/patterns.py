"""Patterns of secrets with high precision, each behind a word that it cannot lack. Pure.

The forms are those that services document. A form that other things share, such as forty characters of base64, is not
here. Examples in documentation say so of themselves, and are no secrets.
A program chooses the text: no pattern repeats alternatives, whose readings of one text could grow without bound.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

_BEFORE: Final = 96
_AFTER: Final = 700
MAX_PLACES: Final = 4096
"""Places of a word inside its secret that are examined; what follows them is unknown."""
MAX_KEY: Final = 16 * 1024
"""Bytes of a private key, from its first line to its last: one of 16,384 bits has 12,600."""
_LONGEST: Final = 1024
"""Letters of a token read at most: none is documented as longer, and a program can repeat a word."""
SHORTEST_SECRET: Final = 22
"""No secret of these kinds is shorter."""
_RUN: Final = re.compile(rb"[A-Za-z0-9_\-./+=]{%d,}+" % SHORTEST_SECRET)
"""Characters of tokens. Ordinary text has few such runs, so most words are searched in a small part of it."""
_BEGINS: Final = (
    rb"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    rb"|(?<=[0-9][A-HJKSTfhlm])|(?<=(?<![A-Za-z0-9_])[BHJKm]))"
)
"""Not within a word, unless only an encoded sign, an escape or the end of a terminal's code makes it one."""
_ENDS: Final = rb"(?![A-Za-z0-9_\-])"
_EXAMPLE: Final = re.compile(rb"(?i)example|xxxx|\.\.\.|placeholder|redacted|0{12}|1234567890")
"""In a match: an example, no secret."""


@dataclass(frozen=True, kw_only=True)
class SecretPattern:
    """One kind of secret."""

    kind: str
    words: tuple[bytes, ...]
    """One of these is in every match: a search for them costs next to nothing."""
    source: bytes
    begins: bool
    unbroken: bool
    """It is a run of letters that ``_RUN`` matches: without such a run with a word, it is absent."""

    @cached_property
    def form(self) -> re.Pattern[bytes]:
        """Return the compiled form. All of them take 16 ms, and most are never needed."""
        return re.compile(self.source)


def _of(kind: str, words: str, source: bytes, *, begins: bool = True, unbroken: bool = False) -> SecretPattern:
    of_words = tuple(word.encode() for word in words.split("|"))
    return SecretPattern(kind=kind, words=of_words, source=source, begins=begins, unbroken=unbroken)


def _token(kind: str, words: str, rest: bytes) -> SecretPattern:
    """Return a kind that begins with one of these words, and no other letters before it."""
    form = _BEGINS + rb"(?:" + words.encode().replace(b".", rb"\.") + rb")" + rest + _ENDS
    return _of(kind, words, form, unbroken=True)


def _run(letters: bytes, least: int) -> bytes:
    """Match at least this many of these letters, as providers lengthen tokens; bounded, never tried with fewer."""
    return b"[%b]{%d,%d}+" % (letters, least, _LONGEST)


_HEX: Final = rb"a-f0-9"
_ALNUM: Final = rb"A-Za-z0-9"
_URL_SAFE: Final = rb"A-Za-z0-9_\-"
_BASE64: Final = rb"A-Za-z0-9+/"
_UUID: Final = rb"[a-f0-9]{8}-(?:[a-f0-9]{4}-){3}[a-f0-9]{12}"
_MIXED: Final = rb"(?=[a-z_\-]{0,64}[A-Z0-9])"
"""A capital or a digit is among the letters: words in prose and names in programs have none."""

#: Kind, the words that it begins with, the letters after them, and how many at least.
_PLAIN: Final[tuple[tuple[str, str, bytes, int], ...]] = (
    ("1Password token", "ops_eyJ", _BASE64, 200),
    ("Adobe secret", "p8e-", rb"a-z0-9", 32),
    ("age key", "AGE-SECRET-KEY-1", rb"02-9AC-HJ-NP-Z", 58),
    ("Amazon Bedrock key", "ABSK", _BASE64, 100),
    ("Amazon Bedrock key", "bedrock-api-key-", _BASE64, 60),
    ("Artifactory token", "AKCp|cmVmd", _ALNUM, 59),
    ("Clojars token", "CLOJARS_|clojars_", rb"a-z0-9", 60),
    ("Databricks token", "dapi", _HEX, 32),
    ("DigitalOcean token", "dop_v1_|doo_v1_|dor_v1_", _HEX, 64),
    ("Docker token", "dckr_pat_|dckr_oat_", _URL_SAFE, 27),
    ("Doppler token", "dp.pt.", _ALNUM, 40),
    ("Duffel token", "duffel_live_|duffel_test_", _URL_SAFE, 43),
    ("EasyPost key", "EZAK|EZTK", _ALNUM, 54),
    ("Facebook token", "EAAC|EAAM", _ALNUM, 100),
    ("Fly.io token", "fo1_", _URL_SAFE, 43),
    ("Fly.io token", "fm1a_|fm1r_|fm2_", _BASE64, 100),
    ("Flutterwave key", "FLWSECK_TEST-|FLWSECK-", rb"a-z0-9X\-", 32),
    ("Frame.io token", "fio-u-", _URL_SAFE, 60),
    ("GitLab token", "GR1348941", _URL_SAFE, 20),
    ("GitLab session", "_gitlab_session=", rb"a-z0-9", 32),
    ("Google API key", "AIza", _URL_SAFE, 35),
    ("Grafana token", "glc_", _BASE64, 32),
    ("Grafana token", "eyJrIjoi", _ALNUM, 70),
    ("Heroku key", "HRKU-AA", _URL_SAFE, 50),
    ("Hugging Face token", "hf_|api_org_", rb"A-Za-z", 34),
    ("Infracost key", "ico-", _ALNUM, 32),
    ("Intra42 secret", "s-s4t2ud-|s-s4t2af-", _HEX, 64),
    ("Linear key", "lin_api_|lin_oauth_", _ALNUM, 40),
    ("New Relic key", "NRAK-", rb"A-Z0-9", 27),
    ("New Relic key", "NRII-", _URL_SAFE, 32),
    ("Notion token", "ntn_", _ALNUM, 40),
    ("npm token", "npm_", _ALNUM, 36),
    ("Octopus Deploy key", "API-", rb"A-Z0-9", 26),
    ("Perplexity key", "pplx-", _ALNUM, 48),
    ("PlanetScale token", "pscale_tkn_|pscale_oauth_|pscale_pw_", _URL_SAFE, 32),
    ("Prefect key", "pnu_|pnb_", _ALNUM, 36),
    ("Pulumi token", "pul-", _HEX, 40),
    ("PyPI token", "pypi-AgEIcHlwaS5vcmc|pypi-AgENdGVzdC5weXBpLm9yZw", _URL_SAFE, 50),
    ("ReadMe key", "rdme_", rb"a-z0-9", 70),
    ("RubyGems key", "rubygems_", _HEX, 48),
    ("Scalingo token", "tk-us-", _URL_SAFE, 48),
    ("Sentry token", "sntryu_", _HEX, 64),
    ("SettleMint token", "sm_aat_|sm_pat_|sm_sat_", _ALNUM, 16),
    ("Shippo token", "shippo_live_|shippo_test_", rb"a-fA-F0-9", 40),
    ("Shopify token", "shpat_|shpss_|shpca_|shppa_", rb"a-fA-F0-9", 32),
    ("Sonar token", "squ_|sqp_|sqa_", _HEX, 40),
    ("Sourcegraph token", "sgp_", rb"a-fA-F0-9_", 40),
    ("Square token", "sq0atp-|sq0csp-|EAAA", _URL_SAFE, 22),
    ("Stripe key", "sk_live_|rk_live_", _ALNUM, 24),
    ("Twilio key", "SK", _HEX, 32),
    ("Typeform token", "tfp_", rb"A-Za-z0-9_.=\-", 50),
    ("Vault token", "hvs.|hvb.|hvr.", _URL_SAFE, 90),
    ("Yandex key", "AQVN", _URL_SAFE, 35),
)
PATTERNS: Final[tuple[SecretPattern, ...]] = (
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
    *(_token(kind, words, _run(letters, least)) for kind, words, letters, least in _PLAIN),
    _token("GitHub token", "ghp_|gho_|ghu_|ghs_|ghr_", _MIXED + _run(rb"A-Za-z0-9_", 36)),
    _token("GitHub token", "github_pat_", rb"[A-Za-z0-9]{22}_" + _run(rb"A-Za-z0-9_", 59)),
    _token(
        "GitLab token",
        "glpat-|gldt-|glft-|glrt-|glcbt-|glffct-|glimt-|glagent-|gloas-|glptt-|glsoat-",
        _MIXED + _run(_URL_SAFE, 20) + rb"(?:\.[a-z0-9]{2,64}){0,2}",
    ),
    _token(
        "Slack token",
        "xoxa-|xoxb-|xoxe-|xoxo-|xoxp-|xoxr-|xoxs-",
        rb"(?:" + _run(_ALNUM, 40) + rb"|[0-9]" + _run(rb"A-Za-z0-9\-", 23) + rb")",
    ),
    _token("Slack app token", "xapp-", rb"[0-9]-[A-Z0-9]{9,32}-[0-9]{10,24}-" + _run(_HEX, 64)),
    _of(
        "Slack webhook",
        "hooks.slack.com/services/",
        rb"hooks\.slack\.com/services/T[A-Z0-9]{8,32}/B[A-Z0-9]{8,32}/" + _run(_ALNUM, 24) + _ENDS,
    ),
    _of(
        "Teams webhook",
        ".webhook.office.com/webhookb2/",
        rb"\.webhook\.office\.com/webhookb2/%b@%b/IncomingWebhook/[a-z0-9]{32,64}/%b" % (_UUID, _UUID, _UUID),
    ),
    _token("Anthropic key", "sk-ant-", rb"[a-z]{3,12}[0-9]{2}-" + _run(_URL_SAFE, 80)),
    _of(
        "OpenAI key",
        "T3BlbkFJ",
        _BEGINS + rb"sk-(?:[a-z]{2,12}-)?[A-Za-z0-9_\-]{20,80}T3BlbkFJ" + _run(_URL_SAFE, 20),
        begins=False,
    ),
    _of(
        "AWS secret key",
        "aws_secret_access_key|AWS_SECRET_ACCESS_KEY|SecretAccessKey|secretAccessKey",
        rb"[A-Za-z_]{15,21}[\"']?\s{0,4}[=:]\s{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    _of("npm token", ":_authToken=", rb":_authToken=" + _UUID + _ENDS),
    _token("1Password key", "A3-", rb"[A-Z0-9]{6}-[A-Z0-9]{6}-?[A-Z0-9]{5}(?:-[A-Z0-9]{5}){2}-" + _run(rb"A-Z0-9", 5)),
    _token("Cloudflare key", "v1.0-", rb"[a-f0-9]{24}-" + _run(_HEX, 140)),
    _token("Dynatrace token", "dt0c01.", rb"[A-Za-z0-9]{24}\." + _run(_ALNUM, 64)),
    _token("Grafana token", "glsa_", rb"[A-Za-z0-9]{32,64}_" + _run(rb"A-Fa-f0-9", 8)),
    _token("Harness token", "pat.|sat.", rb"[A-Za-z0-9_\-]{22}\.[A-Za-z0-9]{24}\." + _run(_ALNUM, 20)),
    _token("Plaid token", "access-production-|access-development-|access-sandbox-", _UUID),
    _token("Postman key", "PMAK-", rb"[a-f0-9]{24}-" + _run(_HEX, 34)),
    _token("SendGrid key", "SG.", rb"[A-Za-z0-9_\-]{22}\." + _run(_URL_SAFE, 43)),
    _token("Brevo key", "xkeysib-", rb"[a-f0-9]{64}-" + _run(_ALNUM, 16)),
    _token("Sentry token", "sntrys_eyJ", rb"[A-Za-z0-9+/]{40,800}={0,2}_" + _run(_BASE64, 43)),
    _of("Azure storage key", "AccountKey=", rb"AccountKey=[A-Za-z0-9+/]{86}=="),
)


_SPACED: Final = tuple(pattern for pattern in PATTERNS if not pattern.unbroken)


def _words_in(data: bytes) -> Iterator[tuple[SecretPattern, bytes, int]]:
    """Yield each word that is there, with its pattern and its first place."""
    if len(data) < SHORTEST_SECRET:
        return
    runs = b" ".join(_RUN.findall(data))
    for pattern in PATTERNS if runs else _SPACED:
        for word in pattern.words:
            if (not pattern.unbroken or word in runs) and (at := data.find(word)) >= 0:
                yield pattern, word, at


_LAST_LINE: Final = re.compile(rb"-----END [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_BODY_LINE: Final = re.compile(rb"(?:\\[rn]|\s)*[A-Za-z0-9+/=]{16,}")


def find_secrets(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield where each secret begins and ends, and its kind, in no order; some may overlap.

    After ``MAX_PLACES`` of a word that is looked around, the rest of the data counts as one: it is not known.
    """
    for pattern, word, at in _words_in(data):
        places = 0
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
            at = data.find(word, after)  # noqa: PLW2901 - the next place of the same word


def _end_of_key(data: bytes, match: re.Match[bytes]) -> int:
    """Return where a private key ends: with its last line, or, without one, with the last of its letters."""
    last = _LAST_LINE.search(data, match.end(), match.start() + MAX_KEY)
    if last is not None:
        return last.end()
    at = match.end()
    while (line := _BODY_LINE.match(data, at)) is not None:
        at = line.end()
    return at
