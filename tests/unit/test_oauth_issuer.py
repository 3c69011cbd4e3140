"""The keys of an authorization server: asked for within bounds, by one for all, and believed for a while."""

import gc
import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.fixtures.issuers import AnIssuer, an_issuer

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.transport.oauth import authority, issuer
from glovebox_server.transport.oauth.authority import Scopes, TokenAuthority
from glovebox_server.transport.oauth.issuer import Header, OAuth, TokenError, TokenIssuer

HERE = "https://glovebox.example/mcp"
HOSTS = ["glovebox.example"]


class Clock:
    """A clock that jumps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


async def opened(theirs: AnIssuer, clock: Clock | None = None) -> TokenAuthority:
    """What checks an issuer's tokens, with its keys."""
    found = TokenAuthority(OAuth(issuer=theirs.url), HOSTS, Scopes())
    if clock is not None:
        found.issuer.clock = clock
    await found.issuer.fetch()
    return found


async def refused(checks: TokenAuthority, token: str, address: str = "192.0.2.1") -> str:
    """Why a token is refused; empty where it is not."""
    try:
        await checks.grant(token, address)
    except TokenError as bad:
        return bad.reason
    return ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://id.example", "no TLS"), ("http://127.0.0.1.evil.example", "no TLS"),
        ("ftp://id.example", "no URL of a web"),
        ("id.example", "no URL of a web"), ("https://", "no URL of a web"), ("https://id.example/?a=b", "query"),
        ("https://id.example/#a", "fragment"), ("https://user@id.example", "no URL of a web"),
        ("https://id.example:port", "no URL"), ("https://id.example/\n", "no URL"), ("https://[::1", "no URL"),
        ("https://id.example/a b", "query"),
    ],
)  # fmt: skip
def test_what_is_no_issuer_is_told(url: str, why: str) -> None:
    """Before anything is asked. The control is one, over TLS or on this machine."""
    with pytest.raises(DiagnosedError, match=why):
        TokenIssuer(url)
    for fine in ("https://id.example", "https://id.example/realms/a", "http://127.0.0.1:8080", "http://localhost/a"):
        assert TokenIssuer(fine).url == fine


def _says(**metadata: Any) -> Callable[[AnIssuer], None]:
    return lambda theirs: theirs.metadata.update(metadata)


def _publishes(content: bytes) -> Callable[[AnIssuer], None]:
    def change(theirs: AnIssuer) -> None:
        theirs.jwks = content

    return change


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda theirs: setattr(theirs, "fails", True), "status 500"),
        (_says(issuer="https://evil.example"), "names another issuer"),
        (_says(jwks_uri=7), "no jwks_uri"), (_says(jwks_uri="http://id.example/jwks"), "no TLS"),
        (_says(jwks_uri="file:///etc/passwd"), "no URL of a web server"),
        (_says(jwks_uri=f"https://{'a' * 70}.example/"), "Asking the OAuth issuer"),
        (_says(jwks_uri="https://xn--.example/"), "Asking the OAuth issuer"),
        (_says(padding="x" * issuer.MAX_DOCUMENT), "longer than"),
        (_publishes(b"x" * (issuer.MAX_DOCUMENT + 1)), "longer than"), (_publishes(b"[" * 5000), "not JSON|levels"),
        (_publishes(b'{"keys":[],"keys":[]}'), "same key twice"),
        (_publishes(json.dumps({"keys": [{}] * 65}).encode()), "more than 64"), (_publishes(b"{}"), "no JWK set"),
        (lambda theirs: theirs.keys.clear(), "publishes no key"),
        # Starlette leads to the one without a slash.
        (lambda theirs: theirs.metadata.update(jwks_uri=f"{theirs.url}/jwks/"), "status 307"),
    ],
)  # fmt: skip
async def test_an_issuer_that_cannot_be_used_is_told(change: Callable[[AnIssuer], None], why: str) -> None:
    """At the start, so that nothing listens; as it was before, it can be used (the control)."""
    async with an_issuer() as theirs:
        await opened(theirs)
        change(theirs)
        with pytest.raises(DiagnosedError, match=why):
            await opened(theirs)


async def test_an_issuer_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bounded time; and one that nobody serves at once."""
    monkeypatch.setattr(issuer, "SECONDS", 0.3)
    async with an_issuer() as theirs:
        theirs.hold = anyio.Event()
        with pytest.raises(DiagnosedError, match="did not answer"):
            await opened(theirs)
        theirs.hold.set()
    with pytest.raises(DiagnosedError, match="Asking the OAuth issuer"):
        await opened(theirs)


async def test_keys_are_found_where_openid_connect_has_them_and_without_a_name() -> None:
    """In three places of an issuer with a path; a token may leave ``kid`` out, but not where two keys would fit."""
    async with an_issuer() as theirs:
        path = f"{theirs.url}/realms/one"
        with pytest.raises(DiagnosedError, match="has no metadata at"):
            await TokenIssuer(path).fetch()
        assert theirs.asked == []
    async with an_issuer() as theirs:
        checks = await opened(theirs, Clock())
        theirs.add_key("other", "RS256")
        await checks.issuer.fetch()
        assert await checks.issuer.key(Header(algorithm="ES256", key=None)) is not None
        theirs.add_key("second")
        await checks.issuer.fetch()
        with pytest.raises(TokenError, match="key"):
            await checks.issuer.key(Header(algorithm="ES256", key=None))


async def test_a_new_key_is_asked_for_once_for_all_who_wait() -> None:
    """Others are let in meanwhile; a stranger's key ids ask again only after a while."""
    clock = Clock()
    async with an_issuer() as theirs, anyio.create_task_group() as tasks:
        checks = await opened(theirs, clock)
        tasks.start_soon(checks.issuer.follow)
        known = theirs.token(HERE)
        assert await refused(checks, known) == ""
        theirs.add_key("second")
        new = [theirs.token(HERE) for _ in range(20)]
        theirs.asked.clear()
        # Asked just now: whatever a token says, not again.
        assert await refused(checks, new[0]) == "key"
        assert theirs.asked == []
        clock.now += issuer.AGAIN_SECONDS
        theirs.hold = anyio.Event()
        found: list[str] = []

        async def ask(token: str) -> None:
            found.append(await refused(checks, token))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as asking:
                for token in new:
                    asking.start_soon(ask, token)
                while "/jwks" not in theirs.asked:  # noqa: ASYNC110 - the issuer's
                    await anyio.sleep(0.01)
                assert await refused(checks, known) == "", "nobody else waits"
                assert found == []
                theirs.hold.set()
        assert found == [""] * 20
        assert theirs.asked.count("/jwks") == 1
        for number in range(50):
            assert await refused(checks, theirs.token(HERE, header={"kid": f"made-up-{number}"})) == "key"
        assert theirs.asked.count("/jwks") == 1
        tasks.cancel_scope.cancel()


async def test_so_many_may_wait_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a connection of somebody who is not known yet; who comes then is told to come later."""
    monkeypatch.setattr(issuer, "MAX_WAITING", 3)
    clock = Clock()
    async with an_issuer() as theirs, anyio.create_task_group() as tasks:
        checks = await opened(theirs, clock)
        tasks.start_soon(checks.issuer.follow)
        clock.now += issuer.AGAIN_SECONDS
        theirs.hold = anyio.Event()
        found: list[str] = []

        async def ask(number: int) -> None:
            found.append(await refused(checks, theirs.token(HERE, header={"kid": f"made-up-{number}"})))

        async with anyio.create_task_group() as asking:
            for number in range(5):
                asking.start_soon(ask, number)
            with anyio.fail_after(30):
                while len(found) < 2:  # noqa: ASYNC110 - theirs
                    await anyio.sleep(0.01)
            assert found == ["busy"] * 2
            theirs.hold.set()
        assert sorted(found) == ["busy"] * 2 + ["key"] * 3
        clock.now += issuer.AGAIN_SECONDS
        assert await refused(checks, theirs.token(HERE, header={"kid": "made-up"})) == "key", "nobody waits any more"
        tasks.cancel_scope.cancel()


async def test_who_waits_for_keys_waits_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nobody asks for them."""
    clock = Clock()
    async with an_issuer() as theirs:
        checks = await opened(theirs, clock)
        clock.now += issuer.AGAIN_SECONDS
        monkeypatch.setattr(issuer, "SECONDS", 0.1)
        with anyio.fail_after(30):
            assert await refused(checks, theirs.token(HERE, header={"kid": "made-up"})) == "key"


@pytest.mark.parametrize(
    ("seconds", "others"), [("REFRESH_SECONDS", "RETRY_SECONDS"), ("RETRY_SECONDS", "REFRESH_SECONDS")]
)
async def test_keys_are_asked_for_from_time_to_time(seconds: str, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A withdrawn key is noticed though nobody comes; sooner where the issuer did not answer the last time."""
    monkeypatch.setattr(issuer, seconds, 0.01)
    monkeypatch.setattr(issuer, others, 3600.0)
    clock = Clock()
    async with an_issuer() as theirs, anyio.create_task_group() as tasks:
        checks = await opened(theirs, clock)
        grant = await checks.grant(theirs.token(HERE), "192.0.2.1")
        del theirs.keys["first"]
        theirs.add_key("second")
        theirs.fails = seconds == "RETRY_SECONDS"
        tasks.start_soon(checks.issuer.follow)
        if theirs.fails:
            clock.now += issuer.AGAIN_SECONDS
            assert await refused(checks, theirs.token(HERE)) == "key"
            assert not grant.removed.is_set()
            theirs.fails = False
        with anyio.fail_after(30):
            await grant.removed.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"jwks_uri": "http://127.0.0.1:1/jwks"}, "is on this machine"),
        ({"jwks_uri": "https://localhost/jwks"}, "is on this machine"),
        ({"jwks_uri": "https://keys.example/jwks"}, "no JWK set"),
        (None, "no metadata"),
    ],
)
async def test_an_issuer_elsewhere_has_its_keys_elsewhere(
    told: dict[str, str] | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would have this host ask what only this host can reach; another server's are asked for (the control)."""
    url = "https://id.example"

    async def document(_issuer: TokenIssuer, _client: object, _url: str) -> Any:
        return [] if told is None else {"issuer": url, **told}

    monkeypatch.setattr(TokenIssuer, "_document", document)
    with pytest.raises(DiagnosedError, match=why):
        await TokenIssuer(url).fetch()


async def test_an_operator_says_what_tokens_are_for_and_whether_they_tell_their_type() -> None:
    """This server's addresses are no audience then; unless he does, they are, and another type is none (controls)."""
    async with an_issuer() as theirs:
        lax = TokenAuthority(OAuth(issuer=theirs.url, any_type=True), HOSTS, Scopes())
        await lax.issuer.fetch()
        token = theirs.token(HERE, header={"typ": "JWT"})
        assert [await refused(checks, token) for checks in (await opened(theirs), lax)] == ["type", ""]
    async with an_issuer() as theirs:
        ours = await opened(theirs)
        named = TokenAuthority(OAuth(issuer=theirs.url, audiences=("api://glovebox",)), HOSTS, Scopes())
        await named.issuer.fetch()
        for audience, with_names, without in (
            (HERE, "audience", ""),
            ("https://glovebox.example", "audience", ""),
            ("api://glovebox", "", "audience"),
            (["api://other", "api://glovebox"], "", "audience"),
            ("http://glovebox.example/mcp", "audience", "audience"),
        ):
            token = theirs.token(audience)
            assert (await refused(named, token), await refused(ours, token)) == (with_names, without)


async def test_a_withdrawn_key_ends_its_tokens() -> None:
    """Also one that was let in before, and what was begun with it; another key's go on (the control)."""
    clock = Clock()
    async with an_issuer() as theirs:
        old = theirs.token(HERE)
        theirs.add_key("second")
        new = theirs.token(HERE)
        checks = await opened(theirs, clock)
        grants = [await checks.grant(token, "192.0.2.1") for token in (old, new)]
        del theirs.keys["first"]
        await checks.issuer.fetch()
        assert [grant.removed.is_set() for grant in grants] == [True, False]
        assert await refused(checks, old) == "key"
        assert await refused(checks, new) == ""


@pytest.mark.long
@pytest.mark.parametrize("most", [2, authority.MAX_KEPT])
async def test_a_withdrawn_key_ends_what_was_begun_with_tokens_that_are_forgotten(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many came in since; what nobody uses is held no longer, and what is of another key goes on (control)."""
    monkeypatch.setattr(authority, "MAX_KEPT", most)
    async with an_issuer() as theirs:
        checks = await opened(theirs)
        withdrawn = [
            await checks.grant(theirs.token(HERE, sub=f"under-way-{number}"), "192.0.2.1") for number in range(2)
        ]
        theirs.add_key("second")
        await checks.issuer.fetch()
        going = await checks.grant(theirs.token(HERE), "192.0.2.1")
        for number in range(most):
            await checks.grant(theirs.token(HERE, sub=f"other-{number}"), "192.0.2.1")
        assert not {*withdrawn, going} & set(checks._kept.values()), "none is remembered any more"
        assert len(checks._keys) == most + 3
        del theirs.keys["first"]
        await checks.issuer.fetch()
        assert [grant.removed.is_set() for grant in (*withdrawn, going)] == [True, True, False]
        del withdrawn, going
        gc.collect()
        assert len(checks._keys) == len(checks._kept) == most


async def test_keys_that_nobody_confirmed_are_none() -> None:
    """An hour after the issuer was last heard, nobody new comes in; before, and when it is back, they do (controls)."""
    clock = Clock()
    async with an_issuer() as theirs, anyio.create_task_group() as tasks:
        checks = await opened(theirs, clock)
        tasks.start_soon(checks.issuer.follow)
        theirs.fails = True
        clock.now += issuer.STALE_SECONDS - 1
        assert await refused(checks, theirs.token(HERE)) == ""
        clock.now += 1
        assert await refused(checks, theirs.token(HERE)) == "busy"
        theirs.fails = False
        clock.now += issuer.AGAIN_SECONDS
        assert await refused(checks, theirs.token(HERE)) == ""
        tasks.cancel_scope.cancel()


async def test_good_tokens_are_remembered_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest; one that was forgotten is checked again, and one that is over is not remembered."""
    monkeypatch.setattr(authority, "MAX_KEPT", 3)
    async with an_issuer() as theirs:
        checks = await opened(theirs)
        tokens = [theirs.token(HERE, sub=f"s{number}") for number in range(5)]
        for token in tokens:
            assert await refused(checks, token) == ""
        assert len(checks._kept) == 3
        kept = list(checks._kept.values())
        assert await refused(checks, tokens[2]) == ""
        assert await refused(checks, tokens[0]) == ""
        assert [grant.principal.rpartition("#")[2] for grant in checks._kept.values()] == ["s4", "s2", "s0"]
        assert list(checks._kept.values())[:2] == [kept[2], kept[0]], "those used last"


@pytest.mark.parametrize("url", ["https://id.example", "https://ID.example:443/a/../b/", "https://bücher.example/"])
def test_the_issuer_is_told_exactly_as_it_names_itself(url: str) -> None:
    """RFC 8414, 3.3: a client compares it, character by character, with what the issuer's own metadata says."""
    told = TokenAuthority(OAuth(issuer=url), HOSTS, Scopes()).metadata(HOSTS[0], f"{authority.METADATA_PATH}/mcp")
    assert json.loads(bytes(told.body))["authorization_servers"] == [url]


@pytest.mark.parametrize(
    ("host", "base"),
    [
        ("glovebox.example", "https://glovebox.example"), ("Glovebox.example:443", "https://glovebox.example"),
        ("glovebox.example:8443", "https://glovebox.example:8443"), ("127.0.0.1:8321", "http://127.0.0.1:8321"),
        ("localhost:8321", "http://localhost:8321"), ("[::1]:8321", "http://[::1]:8321"), ("[::1]", "http://[::1]"),
        ("127.0.0.1.evil.example:8321", "https://127.0.0.1.evil.example:8321"),
    ],
)  # fmt: skip
def test_an_address_is_told_as_clients_write_it(host: str, base: str) -> None:
    """TLS but on this machine itself, and no port that is the scheme's own."""
    assert authority.base_of(host) == base
