"""The worker: one thread that answers servers, and a thread for each source of sandboxes.

``python -m glovebox_sandboxes.worker.main STATE DATA`` is started by the first server of a state directory, and ends a
minute after the last has gone. It holds no key, decides no policy and writes no log. Of a sandbox's wire it reads the
measurement and no byte more. A server that goes away, by whatever end, takes the sandboxes of its calls along.
"""

import os
import select
import socket
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from glovebox_sandboxes.worker import place
from glovebox_sandboxes.worker.answering import SandboxWorker


def main(state: Path, data: Path, *, alone: bool = False) -> None:
    """Listen, tell who started this that it is so by closing standard output, and answer servers.

    Who starts it holds the lock on the directory, or it starts ``alone``. Raises SandboxError if one is there then.
    """
    with place.directory(state) as directory, socket.socket(socket.AF_UNIX) as listener:
        path = place.address(directory, place.name(data))
        with place.locked(directory, path) if alone else nullcontext():
            _listen(listener, path)
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        try:
            with start_blocking_portal() as portal:
                worker = SandboxWorker(listener, data, portal)
                while True:
                    worker.run()
                    place.lock(directory)
                    if not select.select([listener], [], [], 0)[0]:  # no connection is pending
                        os.unlink(path)  # noqa: PTH108 - below an open directory
                        os._exit(0)
                    place.unlock(directory)
        except BaseException:  # noqa: BLE001 - it ends, whatever it was
            traceback.print_exc()
            os._exit(1)


def _listen(listener: socket.socket, path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - of a worker that was killed
    listener.bind(path)
    listener.listen()


if __name__ == "__main__":
    if os.fork():  # no child of a server, which may end before
        os._exit(0)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
