"""Access tokens of strangers: whatever they hold, they are refused in a word, and nothing else is raised."""

import base64
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from joserfc import jws
from tests.fixtures.draws import draws
from tests.fixtures.issuers import AnIssuer

from glovebox_server.transport.oauth import issuer as verify
from glovebox_server.transport.oauth.issuer import OAuth, TokenError
from glovebox_server.transport.tokens import TokenGrant

HERE = "https://glovebox.example/mcp"
ISSUER = AnIssuer(url="https://id.example", algorithm="ES256")
ISSUER.add_key("first")
KEYS = verify.keys_of({"keys": [key.as_dict(private=False) for key in ISSUER.keys.values()]})
EXPECTED = OAuth(issuer=ISSUER.url, audiences=(HERE,), any_type=True)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([HERE, "17"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CLAIMS = ["iss", "aud", "sub", "exp", "nbf", "iat", "scope", "scp", "client_id", "azp", "preferred_username", "email"]
FIELDS = ["alg", "kid", "typ", "crit", "jwk", "jku", "x5u", "x5c", "b64"]


def let_in(token: str) -> TokenGrant | None:
    """Check one; None where it is refused."""
    try:
        header = verify.header_of(token, EXPECTED)
        return verify.identity_of(token, header, KEYS["first"], EXPECTED)
    except TokenError:
        return None


@draws(300)
@given(st.dictionaries(st.sampled_from(CLAIMS), VALUES, max_size=4))
def test_signed_claims_of_any_kind_name_somebody_of_the_issuer_or_nobody(claims: dict[str, Any]) -> None:
    """Even what the issuer signed is only taken for what it is: one principal, bounded and visible."""
    named = {"iss": ISSUER.url, "aud": HERE, "sub": "alice", "exp": int(time.time()) + 60} | claims
    header = {"alg": "ES256", "kid": "first", "typ": "at+jwt"}
    token = jws.serialize_compact(header, json.dumps(named).encode(), ISSUER.keys["first"], algorithms=["ES256"])
    found = let_in(token)
    if found is None:
        assert claims
        return
    assert found.principal.startswith("oauth:https://id.example#")
    assert found.principal.isascii()
    assert found.principal.isprintable()
    assert len(found.principal) <= verify.MAX_PRINCIPAL
    assert (found.expires or 0) > time.time()
    assert found.user is None or (found.user.isprintable() and len(found.user) <= 128)
    assert all(isinstance(scope, str) and scope for scope in found.scopes)


@draws(300)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), st.dictionaries(st.sampled_from(CLAIMS), VALUES))
def test_what_nobody_signed_lets_nobody_in(fields: dict[str, Any], claims: dict[str, Any]) -> None:
    """Whatever its header and claims are."""
    whole = {"alg": "ES256", "kid": "first", "typ": "at+jwt"} | fields
    named = {"iss": ISSUER.url, "aud": HERE, "sub": "root", "exp": int(time.time()) + 60} | claims
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in (whole, named)]
    assert let_in(".".join([*parts, "A" * 86])) is None


@draws(200)
@given(st.text(max_size=60) | st.from_regex(r"[A-Za-z0-9_-]{1,40}\.[A-Za-z0-9_-]{1,40}\.[A-Za-z0-9_-]{1,40}"))
def test_text_of_any_kind_lets_nobody_in(text: str) -> None:
    """Also what looks like a token from afar."""
    assert let_in(text) is None


KINDS = st.sampled_from(["RSA", "EC", "OKP", "P-256", "Ed25519", "AQAB"])
PARTS = st.sampled_from(["kty", "crv", "x", "y", "n", "e", "kid", "use", "alg", "key_ops"])
SETS = st.fixed_dictionaries({"keys": st.lists(st.dictionaries(PARTS, VALUES | KINDS))})


@draws(200)
@given(VALUES | SETS)
def test_a_set_of_keys_of_any_kind_is_read_or_refused(document: Any) -> None:
    """By nothing but ValueError."""
    try:
        found = verify.keys_of(document)
    except ValueError:
        return
    assert all(isinstance(name, str) for name in found)
