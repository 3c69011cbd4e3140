"""The numbers that the redesign of the core is to make smaller do not grow."""

import functools

import pytest
from tests.perf.measures import MEASURES, count_static

#: Bounds, with what is wanted beside them. A landing that makes a number smaller lowers its bound; one that has to
#: raise a bound says why in its commit. tests/interaction/test_footprints.py counts those of calls.
AT_MOST = {
    "warm_files": 34,  # 35
    "warm_moves": 200,  # 200
    "warm_returns": 170,  # 164 to 166: each wait of a coroutine counts, and load decides how many there are
    "warm_off": 0,  # 0
    "warm_idle": 4,
    "egress_files": 25,  # 25
    "longest_function": 60,  # 60
    "app_opened": 25,  # 40
    "product_lines": 57_941,  # 52,000
    "code_lines": 39_582,  # 35,000
    "shared_class_names": 0,  # 10
    "exception_classes": 25,  # 25
    "inner_imports": 15,  # 15
    "words": 30_000,  # 30,000
    # 1,500 of them were product: the harness of whole calls, and what turns a stream of the guest into events.
    "test_lines": 85_286,  # 52,000
    "core_files": 25,
    "core_lines": 6_000,
}
STATIC = [measure.key for measure in MEASURES if measure.part == "static"]
counted = functools.cache(count_static)


@pytest.mark.parametrize("key", [key for key in AT_MOST if key in STATIC])
def test_a_number_does_not_grow(key: str) -> None:
    """Each stays within its bound."""
    assert counted()[key] <= AT_MOST[key]


def test_every_number_with_a_target_has_a_bound() -> None:
    """The control: what the table shows is counted, and has a bound where something is wanted."""
    assert {measure.key for measure in MEASURES if measure.wanted is not None} <= AT_MOST.keys()
    assert {*STATIC} == counted().keys()
