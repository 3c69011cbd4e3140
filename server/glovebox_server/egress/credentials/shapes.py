"""What keys of well-known services begin with. Pure."""

from typing import Final

_PREFIXES: Final = (
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "glptt-", "gldt-", "npm_", "pypi-", "hf_"),
    *("sk-ant-api03-", "sk-ant-", "sk-proj-", "sk-", "sk_live_", "sk_test_", "rk_live_", "pk_live_", "whsec_"),
    *("xoxb-", "xoxp-", "xapp-", "AKIA", "ASIA", "AIzaSy", "ya29.", "SG.", "dop_v1_", "dckr_pat_", "lin_api_"),
    *("shpat_", "secret_", "ntn_", "hvs.", "ATATT", "figd_", "pat-", "eyJ"),
)


def known_prefix(value: str) -> int:
    """Return how many characters a value begins with that everybody knows of its kind."""
    return max((len(each) for each in _PREFIXES if value.startswith(each)), default=0)
