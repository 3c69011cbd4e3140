"""Access tokens: what is wrong with one is found, whatever it is; one that is right lets in (the control of each)."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from joserfc.jwk import OctKey
from tests.fixtures.issuers import AnIssuer, made

from glovebox_server.transport.oauth import issuer as verify
from glovebox_server.transport.oauth.issuer import Header, OAuth, TokenError
from glovebox_server.transport.tokens import TokenGrant

HERE = "https://glovebox.example/mcp"
ISSUER = AnIssuer(url="https://id.example", algorithm="RS256")
ISSUER.add_key("first")
PUBLIC = ISSUER.keys["first"].as_dict(private=False)
EXPECTED = OAuth(issuer=ISSUER.url, audiences=(HERE,))


def at(seconds: int) -> int:
    """So many seconds from now, in Unix time."""
    return int(time.time()) + seconds


def published(issuer: AnIssuer = ISSUER) -> dict[str, verify.IssuerKey]:
    """Its keys, as they are read."""
    return verify.keys_of({"keys": [key.as_dict(private=False) for key in issuer.keys.values()]})


def let_in(token: str, expected: OAuth = EXPECTED, issuer: AnIssuer = ISSUER) -> TokenGrant:
    """Check a token as a server does."""
    header = verify.header_of(token, expected)
    key = published(issuer).get(header.key or "first")
    if key is None:
        raise TokenError("key")
    return verify.identity_of(token, header, key, expected)


def encoded(value: object) -> str:
    """One part of a token."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def modulus(bits: int) -> str:
    """As long as that of an RSA key of so many bits."""
    return encoded(b"\xff" * (bits // 8))


def with_header(token: str, header: object) -> str:
    """The same claims and signature under another header."""
    return ".".join((encoded(header), *token.split(".")[1:]))


def with_claims(token: str, **claims: Any) -> str:
    """The same header and signature over other claims."""
    header, payload, signature = token.split(".")
    before = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return f"{header}.{encoded(before | claims)}.{signature}"


def by_the_public_key(_: str) -> str:
    """HS256 under what everybody can read: as PEM, and so under the key's own id."""
    key: Any = ISSUER.keys["first"]
    pem = key.as_pem(private=False)
    signed = encoded({"alg": "HS256", "kid": "first", "typ": "at+jwt"})
    signed += f".{encoded({'iss': ISSUER.url, 'aud': HERE, 'sub': 'mallory', 'exp': at(300)})}"
    return f"{signed}.{encoded(hmac.digest(pem, signed.encode(), hashlib.sha256))}"


OWN = made("RS256", "first")  # a key of the attacker's, under the id of the issuer's
OWN_PUBLIC = OWN.as_dict(private=False)


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")
@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "ES384", "EdDSA"])
def test_a_token_that_is_right_says_whose_it_is(algorithm: str) -> None:
    """With each kind of key: principal, scopes, the person and the client, and its end."""
    issuer = AnIssuer(url=ISSUER.url, algorithm=algorithm)
    issuer.add_key("first")
    end = at(60)
    token = issuer.token(HERE, scope="b a a", preferred_username="Alice", azp="cli", exp=end)
    found = let_in(token, issuer=issuer)
    assert (found.principal, found.scopes) == ("oauth:https://id.example#alice", ("a", "b"))
    assert (found.user, found.expires) == ("Alice via a-client", end + verify.LEEWAY)


TWICE = b'{"alg":"RS256","kid":"first","typ":"at+jwt","alg":"none"}'

ATTACKS: list[tuple[str, Callable[[str], str], str]] = [
    ("alg none", lambda good: with_header(good, {"alg": "none", "kid": "first", "typ": "at+jwt"}), "algorithm"),
    ("alg None", lambda good: with_header(good, {"alg": "None", "kid": "first", "typ": "at+jwt"}), "algorithm"),
    ("alg a list", lambda good: with_header(good, {"alg": ["RS256"], "kid": "first", "typ": "at+jwt"}), "malformed"),
    ("alg none, no signature", lambda good: good.rpartition(".")[0] + ".", "malformed"),
    ("HS256 by the public key", by_the_public_key, "algorithm"),
    ("HS256 by a word", lambda _: ISSUER.token(
        HERE, key=OctKey.import_key("secret" * 8), header={"alg": "HS256"}), "algorithm"),
    ("another algorithm than the key's", lambda good: with_header(
        good, {"alg": "ES256", "kid": "first", "typ": "at+jwt"}), "algorithm"),
    ("another key", lambda _: ISSUER.token(HERE, key=OWN), "signature"),
    ("another key, brought along", lambda _: ISSUER.token(HERE, key=OWN, header={"jwk": OWN_PUBLIC}), "signature"),
    ("jku", lambda _: ISSUER.token(HERE, key=OWN, header={"jku": "https://evil.example/jwks"}), "signature"),
    ("x5u", lambda _: ISSUER.token(HERE, key=OWN, header={"x5u": "https://evil.example/cert"}), "signature"),
    ("kid of a path", lambda _: ISSUER.token(HERE, key=OWN, header={"kid": "../../../dev/null"}), "key"),
    ("kid of SQL", lambda _: ISSUER.token(HERE, key=OWN, header={"kid": "' UNION SELECT 'x"}), "key"),
    ("kid of an object", lambda good: with_header(good, {"alg": "RS256", "kid": {}, "typ": "at+jwt"}), "malformed"),
    ("other claims", lambda good: with_claims(good, sub="root"), "signature"),
    ("another header", lambda good: with_header(
        good, {"alg": "RS256", "kid": "first", "typ": "at+jwt", "x": 1}), "signature"),
    ("crit", lambda good: with_header(
        good, {"alg": "RS256", "kid": "first", "typ": "at+jwt", "crit": ["b64"], "b64": False}), "malformed"),
    *[(f"{name} alone", lambda good, name=name: with_header(
        good, {"alg": "RS256", "kid": "first", "typ": "at+jwt", name: ["x"]}), "malformed")
      for name in ("crit", "b64", "zip", "enc")],
    ("alg none of no key", lambda good: with_header(good, {"alg": "none", "kid": "x", "typ": "at+jwt"}), "algorithm"),
    ("expired, of no key", lambda _: ISSUER.token(HERE, exp=at(-3600), header={"kid": "x"}), "expired"),
    ("typ a number", lambda good: with_header(good, {"alg": "RS256", "kid": "first", "typ": 7}), "malformed"),
    ("another issuer", lambda _: ISSUER.token(HERE, iss="https://evil.example"), "issuer"),
    ("the issuer and more", lambda _: ISSUER.token(HERE, iss="https://id.example/"), "issuer"),
    ("a list of issuers", lambda _: ISSUER.token(HERE, iss=[ISSUER.url]), "issuer"),
    ("no issuer", lambda _: ISSUER.token(HERE, iss=None), "claims"),
    ("another server's", lambda _: ISSUER.token("https://other.example/mcp"), "audience"),
    ("another path's", lambda _: ISSUER.token("https://glovebox.example/other"), "audience"),
    ("for nobody", lambda _: ISSUER.token([]), "claims"),
    ("no audience", lambda _: ISSUER.token(HERE, aud=None), "claims"),
    ("expired", lambda _: ISSUER.token(HERE, exp=at(-verify.LEEWAY - 60)), "expired"),
    ("no end", lambda _: ISSUER.token(HERE, exp=None), "claims"),
    ("an end that is text", lambda _: ISSUER.token(HERE, exp="never"), "malformed"),
    ("not yet", lambda _: ISSUER.token(HERE, nbf=at(verify.LEEWAY + 60)), "not yet valid"),
    ("made in the future", lambda _: ISSUER.token(HERE, iat=at(verify.LEEWAY + 60)), "not yet valid"),
    ("nobody's", lambda _: ISSUER.token(HERE, sub=None), "claims"),
    ("of an empty name", lambda _: ISSUER.token(HERE, sub=""), "claims"),
    ("of a number", lambda _: ISSUER.token(HERE, sub=7), "claims"),
    ("of an endless name", lambda _: ISSUER.token(HERE, sub="a" * 600), "claims"),
    ("scopes that are none", lambda _: ISSUER.token(HERE, scope={"a": 1}), "claims"),
    ("scopes that are numbers", lambda _: ISSUER.token(HERE, scope=[1]), "claims"),
    ("an ID token", lambda _: ISSUER.token(HERE, header={"typ": "JWT"}, nonce="n"), "type"),
    ("of no type", lambda _: ISSUER.token(HERE, header={"typ": None}), "type"),
    ("a logout token", lambda _: ISSUER.token(HERE, header={"typ": "logout+jwt"}), "type"),
    ("too long", lambda _: ISSUER.token(HERE, groups=["g" * 100] * 100), "malformed"),
    ("two full stops", lambda _: "..", "malformed"),
    ("encrypted", lambda good: good + ".a.b", "malformed"),
    ("no base64", lambda good: "é" + good[1:], "malformed"),
    ("a line feed", lambda good: good + "\n", "malformed"),
    ("a header twice", lambda good: f"{encoded(TWICE)}.{good.partition('.')[2]}", "malformed"),
    ("deep", lambda good: f"{encoded(b'[' * 1400)}.{good.partition('.')[2]}", "malformed"),
    ("a list", lambda good: f"{good.split('.')[0]}.{encoded([1])}.{good.split('.')[2]}", "malformed"),
]  # fmt: skip


@pytest.mark.parametrize(("attack", "reason"), [each[1:] for each in ATTACKS], ids=[each[0] for each in ATTACKS])
def test_an_attack_is_refused_for_its_reason(attack: Callable[[str], str], reason: str) -> None:
    """And the token it is made from lets in, so that nothing else was in its way (the control)."""
    good = ISSUER.token(HERE)
    with pytest.raises(TokenError) as refused:
        let_in(attack(good))
    assert refused.value.reason == reason
    assert let_in(good).principal == "oauth:https://id.example#alice"


def test_clocks_may_differ_scopes_are_few_and_a_users_words_short() -> None:
    """Half a minute either way; each scope once, as text or as a list (fewer are all there); whatever it says."""
    every: list[dict[str, Any]] = [{"exp": at(-5)}, {"nbf": at(20)}, {"iat": at(20)}]
    for claims in every:
        assert let_in(ISSUER.token(HERE, **claims)).principal
    names = [f"s{number:03}" for number in range(100)]
    for scopes in ({"scope": " ".join(names)}, {"scp": names * 2}):
        assert let_in(ISSUER.token(HERE, **scopes)).scopes == tuple(names[:64])
    assert let_in(ISSUER.token(HERE, scp=names[:64])).scopes == tuple(names[:64])
    user = let_in(ISSUER.token(HERE, preferred_username="a\u202e\n" + "b" * 500, client_id="c\x1b[2J")).user
    assert user is not None
    assert user.isprintable()
    assert len(user) <= 128


def test_an_operator_may_accept_tokens_that_do_not_say_what_they_are() -> None:
    """Many providers' are `JWT`; what only ID tokens and logout tokens have, makes them none all the same."""
    lax = OAuth(issuer=ISSUER.url, audiences=(HERE,), any_type=True)
    for kind in ("JWT", "jwt", "", "application/at+jwt"):
        assert let_in(ISSUER.token(HERE, header={"typ": kind}), lax).principal
    every: list[dict[str, Any]] = [{name: "h"} for name in ("nonce", "at_hash", "c_hash", "s_hash", "events")]
    others = [ISSUER.token(HERE, header={"typ": "JWT"}, **claims) for claims in every]
    for token in (*others, ISSUER.token(HERE, header={"typ": "logout+jwt"})):
        with pytest.raises(TokenError) as refused:
            let_in(token, lax)
        assert refused.value.reason == "type"


def test_two_subjects_are_never_one_principal() -> None:
    """Whatever they are called; and none is anybody's token, or another line of a record."""
    names = ["a b", "a%20b", "a#b", "a/b", "a\nb", "ä", "a\u202eb", "A", "a", "token:ci", "a@b.example", "auth0|7"]
    principals = [let_in(ISSUER.token(HERE, sub=name)).principal for name in names]
    assert len(set(principals)) == len(names)
    assert all(each.startswith("oauth:https://id.example#") and each.isascii() for each in principals)
    assert all(each.isprintable() and each.count("#") == 1 for each in principals)
    assert principals[3] == "oauth:https://id.example#a%2Fb"
    assert principals[-2:] == ["oauth:https://id.example#a@b.example", "oauth:https://id.example#auth0|7"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True), ({"use": "enc"}, False), ({"alg": "RS384"}, True), ({"alg": "HS256"}, False),
        ({"alg": "none"}, False),
        ({"kty": "oct", "k": "AAAA"}, False), ({"kty": ["RSA"]}, False), ({"key_ops": ["sign"]}, False),
        ({"n": "AQAB"}, False), ({"n": 7}, False), ({"e": "A" * 400}, False), ({"d": "AQAB"}, False),
        (ISSUER.keys["first"].as_dict(private=True), False), ({"e": "AQAAAAE"}, False),
        ({"n": modulus(1024)}, False), ({"n": modulus(2048)}, True), ({"n": modulus(8192)}, True),
        ({"n": modulus(8200)}, False),
        ({"kid": 7}, False),
    ],
)  # fmt: skip
def test_keys_for_anything_else_are_left_out(change: dict[str, Any], kept: bool) -> None:
    """Symmetric, for encryption, too short, slow on purpose, or private: nothing is checked with them."""
    found = verify.keys_of({"keys": [PUBLIC | change, "no key"]})
    assert len(found) == kept
    if kept and "alg" in change:
        assert found["first"].algorithms == ("RS384",)


def test_a_set_of_keys_is_bounded_and_a_second_of_one_name_changes_nothing() -> None:
    """What is no set is refused."""
    every: list[Any] = [None, [], {}, {"keys": {}}, {"keys": [PUBLIC] * (verify.MAX_KEYS + 1)}]
    for wrong in every:
        with pytest.raises(ValueError, match="keys"):
            verify.keys_of(wrong)
    both = verify.keys_of({"keys": [PUBLIC, OWN_PUBLIC]})
    assert both == verify.keys_of({"keys": [PUBLIC]})
    assert verify.identity_of(ISSUER.token(HERE), Header(algorithm="RS256", key="first"), both["first"], EXPECTED)
