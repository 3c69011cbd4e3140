"""Makers of audit records for tests, and a process that appends until it is killed (`python -m tests.audit_logs`)."""

import os
import signal
import sys
from pathlib import Path

import anyio

from glovebox_server.audit.chain import Record
from glovebox_server.audit.events import CallDecided, CallFinished, Output, draft
from glovebox_server.audit.file import HEAD_NAME, LOG_NAME, LogFile
from glovebox_server.audit.log import AuditLog


def decided(call_id: str = "c_1", principal: str = "local:0", reason: str = "allowed by the profile") -> CallDecided:
    """Return the event that begins a call."""
    return CallDecided(
        call_id=call_id,
        principal=principal,
        transport="stdio",
        tool="run_python",
        effect="allow",
        rule="profile.allow",
        reason=reason,
        profile_digest="sha256:" + "a" * 64,
        arguments_digest="sha256:" + "b" * 64,
        arguments_bytes=17,
    )


def finished(call_id: str = "c_1") -> CallFinished:
    """Return the event that ends a call."""
    output = Output(name="stdout", digest="sha256:" + "c" * 64, bytes=2)
    usage = {"cpu_seconds": 0.25, "memory_peak_bytes": 1 << 20}
    return CallFinished(call_id=call_id, ended="exited", exit_code=0, elapsed_ms=12.5, usage=usage, outputs=(output,))


def fill(directory: Path, count: int, server: str = "s_test") -> list[Record]:
    """Append ``count`` records, two per call, and return them."""
    file = LogFile(directory, server)
    try:
        events = (decided(f"c_{n // 2}") if n % 2 == 0 else finished(f"c_{n // 2}") for n in range(count))
        return [file.commit([draft(event)])[0] for event in events]
    finally:
        file.close()


def log_lines(directory: Path) -> list[bytes]:
    """Return the lines of the log, line feeds included."""
    return (directory / LOG_NAME).read_bytes().splitlines(keepends=True)


def replace_lines(directory: Path, lines: list[bytes]) -> None:
    """Put other lines in the place of the log's, as an attacker with write access would."""
    (directory / LOG_NAME).write_bytes(b"".join(lines))


def replace_head(directory: Path, content: bytes) -> None:
    """Put other bytes in the place of head.json's."""
    (directory / HEAD_NAME).write_bytes(content)


def tear_next_write() -> None:
    """Make this process die by SIGKILL after the first half of its next write."""
    write = os.write

    def torn(descriptor: int, content: bytes) -> int:
        write(descriptor, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.write = torn  # type: ignore[assignment]


async def _append_until_killed(directory: Path, server: str, count: int, tear: int) -> None:
    async with AuditLog.open(directory, server) as log:
        for number in range(count):
            if number == tear:
                tear_next_write()
            record = await log.append(decided(f"c_{server}_{number}"))
            # The acknowledgement: whoever reads it may rely on the record.
            sys.stdout.buffer.write(f"{record.seq}:{record.hash}\n".encode())
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    anyio.run(_append_until_killed, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
