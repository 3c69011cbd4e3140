"""What one key gets of the processors: weights of its sandboxes, and turns of its guests on the event loop."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from glovebox_sandboxes.host.cgroup import Cgroup, GroupFiles, Hierarchy
from glovebox_sandboxes.pool.pool import ProcessorShares


@dataclass(eq=False)
class Light:
    """As much of a sandbox, and of what is attested of it, as is used here."""

    weights: list[int] = field(default_factory=list)
    pause: Any = None

    def weigh(self, parts: int) -> None:
        """Remember it."""
        self.weights.append(parts)

    @property
    def sandbox(self) -> "Light":
        """Itself."""
        return self

    @property
    def link(self) -> "Light":
        """Itself."""
        return self


@pytest.mark.parametrize(("version", "file", "default"), [(1, "cpu.shares", 1024), (2, "cpu.weight", 100)])
def test_a_group_weighs_as_much_as_its_part(version: int, file: str, default: int, tmp_path: Path) -> None:
    """Of what every group begins with; one that is gone, or a container's that is not seen, is none to weigh."""
    parents = tuple(tmp_path / name for name in ("memory", "pids", "cpu")[: 3 if version == 1 else 1])
    for parent in parents:
        parent.mkdir()
    group = Cgroup(Hierarchy(version=version, parents=parents), "s1", {})
    weight = parents[-1] / "s1" / file
    weight.touch()
    group.weigh(16)
    assert weight.read_text() == str(default // 16)
    weight.unlink()
    (parents[-1] / "s1").rmdir()
    group.weigh(1)
    GroupFiles({}).weigh(1)
    assert not weight.exists()


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "control"])
async def test_in_each_round_of_the_loop_one_guest_that_floods_has_its_turn(*, fair: bool) -> None:
    """M7: twelve floods of one key and one of another: every third turn is the other's, and never two in one round."""
    # The control is a checkpoint, as it was: all thirteen have their turn in the same round of the loop.
    processor = ProcessorShares()
    now, turns = 0, []

    async def flood(key: str, pause: Any) -> None:
        while now < 300:
            turns.append((key, now))
            await pause()

    async with anyio.create_task_group() as tasks:
        for key in [*["greedy"] * 12, "peer"]:
            light: Any = Light()
            processor.shared(key, light).__enter__()
            tasks.start_soon(flood, key, light.pause if fair else anyio.lowlevel.checkpoint)
        while now < 300:
            await anyio.lowlevel.checkpoint()
            now += 1
    later = turns[13:]
    at_once = max(Counter(number for _, number in later[:-13]).values())
    peers = sum(key == "peer" for key, _ in later) / len(later)
    assert at_once == (1 if fair else 13)
    assert peers == pytest.approx(1 / 3 if fair else 1 / 13, abs=0.01)


def test_only_a_change_of_the_part_is_written() -> None:
    """A call that is alone writes nothing; of twelve, each is written when parts halve or double."""
    processor = ProcessorShares()
    lights: list[Any] = [Light() for _ in range(12)]
    managers = [processor.shared("key", light) for light in lights]
    managers[0].__enter__()
    assert lights[0].weights == []
    for manager in managers[1:]:
        manager.__enter__()
    assert lights[0].weights == [2, 4, 8, 16]
    assert {light.weights[-1] for light in lights} == {16}
    for manager in managers:
        manager.__exit__(None, None, None)
    assert lights[11].weights == [16, 8, 4, 2, 1]
