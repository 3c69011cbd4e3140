"""The time that budgets go by: whatever is done to the clocks, a window lasts as long as it says."""

from hypothesis import given
from hypothesis import strategies as st

from glovebox_server.guards.budgets.spending import LENGTH_MS, Clocks, Every, advanced, read_clocks, window

HOUR, DAY = LENGTH_MS["hour"], LENGTH_MS["day"]
NOW = 1_800_000_000_000
TIMES = st.integers(0, 1 << 45)
EVERY: st.SearchStrategy[Every] = st.sampled_from(["minute", "hour", "day"])


def clocks(wall: int = NOW, since_boot: int = 1_000, boot: str = "a") -> Clocks:
    return Clocks(wall=wall, boot=boot, since_boot=since_boot)


@given(every=EVERY, time=TIMES)
def test_windows_lie_side_by_side(every: Every, time: int) -> None:
    """Each time is in one window, the next one begins where it ends, and it is as long as it says."""
    start, end = window(every, time)
    assert start <= time < end == start + LENGTH_MS[every]
    assert window(every, end)[0] == end
    assert window(every, end - 1) == (start, end)


def test_windows_begin_on_the_hour_and_the_clocks_of_this_machine_can_be_read() -> None:
    assert window("hour", 3 * HOUR + 5)[0] == 3 * HOUR
    assert window("day", 3 * DAY + 5 * HOUR)[0] == 3 * DAY
    assert window("run", 7)[0] == window("run", NOW)[0] == 0
    one, two = read_clocks(), read_clocks()
    assert one.boot == two.boot
    assert one.since_boot <= two.since_boot


@given(st.lists(st.tuples(TIMES, st.integers(0, 10 * DAY))))
def test_within_a_boot_time_is_that_of_no_wall_clock(steps: list[tuple[int, int]]) -> None:
    """Set forward, set back, over and over: as much time passes as passed."""
    mark, since_boot, passed = advanced(None, clocks()), 1_000, 0
    for wall, step in steps:
        since_boot, passed = since_boot + step, passed + step
        mark = advanced(mark, clocks(wall, since_boot))
        assert mark.wall == NOW + passed


@given(st.lists(st.tuples(TIMES, st.integers(0, DAY), st.booleans())))
def test_time_never_goes_back(steps: list[tuple[int, int, bool]]) -> None:
    """Not over reboots either, with whatever wall clock; and it goes on after each."""
    mark, boot, since_boot = advanced(None, clocks()), 0, 1_000
    for wall, step, reboots in steps:
        boot, since_boot = (boot + 1, step) if reboots else (boot, since_boot + step)
        after = advanced(mark, clocks(wall, since_boot, str(boot)))
        assert after.wall >= mark.wall
        mark = after
        assert advanced(mark, clocks(0, since_boot + HOUR, str(boot))).wall == mark.wall + HOUR


def test_a_clock_set_back_locks_nobody_out_and_one_set_forward_refills_nothing() -> None:
    """Within the boot and after the next, with no other clock to go by; time_namespaces(7) can shift it."""
    mark = advanced(None, clocks())
    assert window("hour", advanced(mark, clocks(NOW - 365 * DAY, 1_000 + HOUR)).wall) > window("hour", NOW)
    rebooted = advanced(mark, clocks(NOW - 365 * DAY, 0, "b"))
    assert rebooted.wall == NOW
    assert advanced(rebooted, clocks(NOW - 365 * DAY, HOUR, "b")).wall == NOW + HOUR
    mark = advanced(None, clocks())
    assert advanced(mark, clocks(NOW + 365 * DAY, 2_000)).wall == NOW + 1_000
    assert advanced(mark, clocks(NOW + DAY, 5, "b")).wall == NOW + DAY
    assert advanced(Clocks(wall=NOW, boot="a", since_boot=10**9), clocks(NOW, 5)).wall == NOW
