"""Guests that take away the streams of their inputs."""

from collections.abc import AsyncGenerator

import anyio
import pytest
from tests.fixtures.channels import READY, Guest
from tests.unit.test_connection import SECONDS, Taker, converse, frame, linked, opening

from _glovebox_guest import wire
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.session import connection


async def test_a_guest_that_gives_up_an_input_has_ended() -> None:
    """Also between its last bytes and its end, where there is nothing left to send."""

    async def script(guest: Guest) -> None:
        await guest.start()
        await guest.say(frame(6, 2))
        await anyio.sleep_forever()

    async with linked(script) as link:

        async def content() -> AsyncGenerator[bytes, None]:
            yield b"x"
            await anyio.wait_all_tasks_blocked()
            assert not link.wire.is_open(2)

        await link.ready()
        with pytest.raises(anyio.EndOfStream):
            await link.run({"kind": "python"}, [("a", content())], {}, Taker().accept, None)


async def test_a_guest_that_leaves_no_stream_for_an_input_is_told_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the job, and opens as many as there may be, all in its first turn."""
    monkeypatch.setattr(connection, "_TURN_SECONDS", SECONDS)

    async def script(guest: Guest) -> None:
        opened = b"".join(opening(2 * number + 1) for number in range(wire.MAX_OPEN))
        await guest.say(guest.wire.message("ready", READY) + opened)
        await anyio.sleep_forever()

    with pytest.raises(SandboxError, match="streams at once"):
        await converse(script, inputs=[("a", b"x")])
