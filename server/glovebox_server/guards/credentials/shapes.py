"""What keys look like: what those of well-known services begin with, and placeholders of the same look."""

import secrets
import string
from typing import Final

_LENGTHS: Final = (40, 64, 96, 128, 256)
"""Of placeholders: the first that a value has room in. 40 characters is also what the search for markers needs."""

_PREFIXES: Final = (
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "glptt-", "gldt-", "npm_", "pypi-", "hf_"),
    *("sk-ant-api03-", "sk-ant-", "sk-proj-", "sk-", "sk_live_", "sk_test_", "rk_live_", "pk_live_", "whsec_"),
    *("xoxb-", "xoxp-", "xapp-", "AKIA", "ASIA", "AIzaSy", "ya29.", "SG.", "dop_v1_", "dckr_pat_", "lin_api_"),
    *("shpat_", "secret_", "ntn_", "hvs.", "ATATT", "figd_", "pat-", "eyJ"),
)


def known_prefix(value: str) -> int:
    """Return how many characters a value begins with that everybody knows of its kind."""
    return max((len(each) for each in _PREFIXES if value.startswith(each)), default=0)


def placeholder(value: str) -> str:
    """Return a random text that looks like the value to a client that checks how keys of its kind begin."""
    begin = value[: known_prefix(value)]
    length = next((each for each in _LENGTHS if len(value) <= each), _LENGTHS[-1])
    return begin + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length - len(begin)))
