"""Every fuzz target holds on its kept inputs and on small changes of them; no fuzzer is needed for that."""

import random

import pytest
from tests.fuzz.harness import SEEDS, TARGETS, load
from tests.fuzz.patches import OLD

from glovebox_server.promotion.plan import made

CHANGES = 2000  # for one target: a smoke test. `make fuzz` is what searches.


def _changed(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0, len(made))
        what = chance.randrange(3)
        if what == 0:
            made[place : place + 1] = chance.randbytes(1)
        elif what == 1:
            del made[place : place + chance.randint(1, 8)]
        else:
            made[place:place] = made[: chance.randint(0, 16)] or b"\0"
    return bytes(made)


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_and_their_neighbours_hold(target: str) -> None:
    """The same changes in every run, on every machine."""
    check = load(target)
    seeds = [path.read_bytes() for path in sorted((SEEDS / target).iterdir())]
    assert seeds
    for data in (b"", *seeds):
        check(data)
    chance = random.Random(target)  # noqa: S311 - not for secrets
    for _ in range(CHANGES):
        check(_changed(chance.choice(seeds), chance))


def test_a_seed_is_a_patch_that_is_read_and_applied() -> None:
    """Else the fuzzer would only meet what is refused at its first line."""
    patch = (SEEDS / "patches" / "ours").read_bytes()
    assert {each.name for each in made(patch, OLD.get)} == {*OLD, 'q"/conftest.py', "ü/empty"}


def test_every_directory_of_seeds_belongs_to_a_target() -> None:
    """A renamed target does not leave its inputs behind."""
    assert {path.name for path in SEEDS.iterdir()} == set(TARGETS)
