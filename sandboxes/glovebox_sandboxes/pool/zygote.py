"""The host's side of a zygote: orders out, sandboxes in. Its program is ``_glovebox_guest.zygote``.

It forks on request and receives nothing else. Nothing of a driver or of the server here.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
from anyio.abc import UNIXSocketStream

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.process import START_SECONDS
from glovebox_sandboxes.host.sandbox import Process

IMPORT_SECONDS = 60.0
"""For all that a profile preloads: half a second for pandas on an idle machine."""
_MAX_WORDS = 4096


async def ready(channel: UNIXSocketStream) -> Mapping[str, int]:
    """Wait until its imports are done; return the inode numbers of its own namespaces.

    Raises SandboxError if a module cannot be imported, and anyio.EndOfStream if it ended without a word.
    """
    attempted = "Importing what a profile preloads"
    fix = "Correct python.preload in the profile, or install the module in the sandboxes' Python."
    try:
        with anyio.fail_after(IMPORT_SECONDS):
            words = (await channel.receive(_MAX_WORDS)).decode(errors="replace")
    except TimeoutError:
        raise SandboxError(attempted, f"it took longer than {IMPORT_SECONDS:.0f} seconds", fix) from None
    try:
        namespaces: Mapping[str, int] = json.loads(words)["namespaces"]
    except (ValueError, TypeError, KeyError):
        raise SandboxError(attempted, words, fix) from None
    return namespaces


async def fork(channel: UNIXSocketStream, detail: int, entrances: Sequence[str], uid: int | None) -> Process | None:
    """Fork a sandbox; return None if it ended at once. Raises OSError, also if the zygote is gone.

    ``detail`` becomes its standard error, by ``entrances`` it enters its control groups, and ``uid`` is its user by
    the zygote's numbers; None for the zygote's own.
    """
    with ExitStack() as held:
        ours, theirs = socket.socketpair()
        held.callback(theirs.close)
        stream = await UNIXSocketStream.from_socket(ours)
        try:
            descriptors = [theirs.fileno(), detail]
            for entrance in entrances:
                descriptors.append(os.open(entrance, os.O_WRONLY | os.O_CLOEXEC))
                held.callback(os.close, descriptors[-1])
            await channel.send_fds(json.dumps({"uid": uid}).encode(), descriptors)
            held.close()
            with anyio.fail_after(START_SECONDS):
                try:
                    _, (pidfd,) = await stream.receive_fds(1, 1)
                except (anyio.EndOfStream, anyio.BrokenResourceError, ValueError):
                    await stream.aclose()
                    return None
            # proc(5), /proc/pid/fdinfo: the process's number on our side.
            told = Path(f"/proc/self/fdinfo/{pidfd}").read_text()  # noqa: ASYNC240 - the kernel's memory
            return Process(int(told.partition("\nPid:")[2].split()[0]), pidfd, stream, ours=False)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError) as problem:
            await stream.aclose()
            raise BrokenPipeError(0, "the zygote is gone") from problem
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            raise
