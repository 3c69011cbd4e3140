"""Shares of connections and sessions: even among tokens, and something left for each subject that comes."""

from collections import Counter

import pytest
from tests.fixtures.callers import a_token

from glovebox_server.transport.auth import LEAST_SHARE, Shares, kind_of
from glovebox_server.transport.tokens import Callers


def _callers(number: int) -> Callers:
    return Callers({f"t{each}": a_token(f"t{each}", f"{each}".rjust(40, "x")) for each in range(number)})


def _taken(shares: Shares, principal: str, held: Counter[str]) -> int:
    def alike() -> int:
        return sum(count for each, count in held.items() if kind_of(each) == kind_of(principal))

    while shares.allows(principal, held[principal], alike()):
        held[principal] += 1
    return held[principal]


@pytest.mark.parametrize(("tokens", "share"), [(0, 900), (1, 900), (3, 300), (64, 14)])
def test_tokens_share_evenly(tokens: int, share: int) -> None:
    """As many each as there are tokens; without a token, as for one that is about to be made."""
    assert _taken(Shares(900, _callers(tokens), subjects=False), "token:t0", Counter()) == share


@pytest.mark.parametrize("subjects", [False, True])
def test_of_very_many_tokens_each_has_a_few_places_while_there_are_any(subjects: bool) -> None:
    """A thousand: none is shut out by tokens that are not in use, and subjects keep their half."""
    shares, held = Shares(900, _callers(1000), subjects=subjects), Counter[str]()
    taken = [_taken(shares, f"token:t{number}", held) for number in range(120)]
    assert taken[:56] == [LEAST_SHARE] * 56
    assert sum(taken) == (450 if subjects else 900)
    assert _taken(shares, "oauth:i#a", held) == (225 if subjects else 0)


def test_subjects_leave_tokens_their_half_and_each_other_something() -> None:
    """However many come: the first has most, each one that comes gets some, and no token less than its share."""
    shares, held = Shares(900, _callers(3), subjects=True), Counter[str]()
    taken = [_taken(shares, f"oauth:i#{number}", held) for number in range(40)]
    assert taken[:4] == [225, 113, 56, 28]
    assert sum(taken) <= 450
    assert _taken(shares, "token:t1", held) == 150
    assert _taken(shares, "token:t2", held) == 150
    assert held.total() <= 900


def test_when_a_subject_leaves_others_have_more() -> None:
    """Nothing is kept for who is gone."""
    shares, held = Shares(100, _callers(0), subjects=True), Counter[str]()
    assert _taken(shares, "oauth:i#a", held) == 50
    assert _taken(shares, "oauth:i#b", held) == 25
    del held["oauth:i#a"]
    assert _taken(shares, "oauth:i#b", held) == 50
