"""Process 1 in C reads the host's frames as the guest in Python does, or refuses them; its build is reproducible."""

import os
import random
import shutil
import struct
import subprocess  # noqa: TID251 - runs the compiler, and what it made of our own text
from collections.abc import Callable
from pathlib import Path

import pytest

from _glovebox_guest import wire
from _glovebox_guest.wire import ProtocolError, Wire
from glovebox_sandboxes.runtime import guest_tree

SOURCE = guest_tree.PROCESS_1.with_name("process_1.c")
BUILD = SOURCE.with_name("build")
CASES = int(os.environ.get("PROCESS_1_CASES", "4000"))
"""More in `make soak`."""
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")

WINDOW, RESET, MESSAGE = 7, 6, 1


def frame(kind: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!BII", kind, stream, len(payload)) + payload


def guest() -> Wire:
    """The state that wire_cases.c begins in: two streams are open, one of them with little credit."""
    codec = Wire("guest")
    codec.state = "running"
    poor, _ = codec.open("stdout")
    codec.data(poor, bytes(wire.WINDOW - 1000))
    codec.open("stderr")
    return codec


def verdict(data: bytes) -> str:
    """What the guest in Python makes of the same bytes, in the harness's words."""
    codec, stop = guest(), ""
    try:
        codec.feed(data)
        while (event := codec.event()) is not None:
            if event[0] == "message":
                stop = event[2]["body"].get("reason", "")
            elif event[0] not in ("credit", "reset", "nothing"):
                return "broken"
    except ProtocolError:
        return "broken"
    open_streams = [(codec.is_open(stream), codec.credit(stream)) for stream in (1, 3)]
    return "|".join([str(stop), *(f"{int(is_open)} {credit if is_open else '-'}" for is_open, credit in open_streams)])


def honest(draw: random.Random) -> bytes:
    """A frame as the host's codec writes it."""
    stream = draw.choice((1, 1, 3))
    return draw.choice((
        frame(WINDOW, stream, b'{"credit":%d}' % draw.choice((1, 7, 524_288, 700_000, 1_048_576))),
        frame(RESET, stream, b'{"reason":"refused"}'),
        frame(MESSAGE, 0, b'{"kind":"stop","body":{"reason":"processor"}}'),
    ))  # fmt: skip


def hostile(draw: random.Random) -> bytes:
    """Frames that no host of ours writes, and honest ones with bytes changed, taken out or put in."""
    made = bytearray(b"".join(honest(draw) for _ in range(draw.randint(1, 4))))
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(made) + 1)
        how = draw.randrange(4)
        if how == 0:
            del made[at : at + draw.randint(1, 9)]
        elif how == 1:
            made[at:at] = draw.randbytes(draw.randint(1, 9))
        elif how == 2:
            made[at : at + 1] = bytes([draw.choice(b'0123456789{}":,\x00\x01\x06\x07\xff')])
        else:
            made[at:at] = struct.pack("!BII", draw.randrange(9), draw.choice((0, 1, 2, 3, 5, 2**32 - 1)),
                                      draw.choice((0, 1, 12, 65_527, 65_528, 2**20, 2**32 - 1)))  # fmt: skip
    return bytes(made)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[list[bytes]]], list[str]]:
    """The C codec with AddressSanitizer: it takes cases, each in chunks, and returns a verdict for each."""
    program = tmp_path_factory.mktemp("wire") / "cases"
    sanitized = [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    harness = Path(__file__).parents[1] / "fixtures" / "wire_cases.c"
    subprocess.run(["cc", "-std=c11", *sanitized, "-I", SOURCE.parent, "-o", program, harness], check=True)

    def asked(cases: list[list[bytes]]) -> list[str]:
        words = [struct.pack("!I", len(case)) + b"".join(struct.pack("!I", len(c)) + c for c in case) for case in cases]
        done = subprocess.run([program], input=b"".join(words), capture_output=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        return done.stdout.decode().splitlines()

    return asked


def split(draw: random.Random, data: bytes) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(4)))
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


def without_closed(told: str) -> str:
    """A closed stream's credit is nobody's."""
    stop, *streams = told.split("|")
    return "|".join([stop, *(each if each.startswith("1") else "0 -" for each in streams)])


def test_honest_frames_mean_the_same_to_both_guests(ask: Callable[[list[list[bytes]]], list[str]]) -> None:
    """However they are cut; where the host gives more credit than it has, both end the connection."""
    draw = random.Random(1)  # noqa: S311 - the same cases each time
    cases = [b"".join(honest(draw) for _ in range(draw.randint(0, 6))) for _ in range(CASES // 2)]
    found = ask([split(draw, case) for case in cases])
    assert [told if told == "broken" else without_closed(told) for told in found] == [verdict(case) for case in cases]
    assert 0 < found.count("broken") < len(found) // 2


def test_what_c_takes_python_takes(ask: Callable[[list[list[bytes]]], list[str]]) -> None:
    """No byte is read that was not received; and whatever is not refused means the same to both guests."""
    draw = random.Random(2)  # noqa: S311 - as above
    cases = [hostile(draw) for _ in range(CASES)]
    found = ask([split(draw, case) for case in cases])
    taken = [(case, told) for case, told in zip(cases, found, strict=True) if told != "broken"]
    assert len(cases) // 20 < len(taken) < len(cases)
    assert [(case, without_closed(told)) for case, told in taken] == [(case, verdict(case)) for case, _ in taken]


def test_a_build_is_the_same_in_another_folder(tmp_path: Path) -> None:
    """So that its digest, which is the plan's, tells of its text and its compiler alone."""
    built = []
    for name in ("one", "another"):
        place = tmp_path / name
        place.mkdir()
        for file in (SOURCE, SOURCE.with_name("wire.h"), BUILD):
            shutil.copy(file, place)
        subprocess.run([place / "build"], check=True, cwd=place)
        (library,) = place.glob("*.so")
        built.append(library.read_bytes())
    assert built[0] == built[1]


def test_it_is_no_longer_than_was_agreed() -> None:
    """Every line of it is trusted."""
    assert sum(len(path.read_text().splitlines()) for path in SOURCE.parent.glob("*.[ch]")) <= 900
