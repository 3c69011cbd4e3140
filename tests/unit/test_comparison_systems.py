"""How other systems are run for the comparison: under a clock, with an end to output, and read as meant."""

import json
from pathlib import Path

import pytest
from tests.comparison import running
from tests.comparison.portable import Ended
from tests.comparison.running import Ran
from tests.comparison.systems import Docker, LlmSandbox, McpRunPython, SandboxRuntime

from glovebox_sandboxes.conformance.case import LIMITS

HOME = Path("/nowhere")
RUNTIME = SandboxRuntime(HOME, "0", notes="")
LLM = LlmSandbox(HOME, "image", "0")
PYODIDE = McpRunPython(HOME, "0", notes="")


def lines(*events: dict[str, object]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


async def test_a_command_that_ends_is_waited_for() -> None:
    ran = await running.run(["sh", "-c", "read a; echo got $a; echo hidden >&2; exit 3"], seconds=20, stdin=b"it\n")
    assert (ran.ended, ran.code, ran.stdout, ran.stderr) == ("ended", 3, b"got it\n", b"hidden\n")


async def test_a_command_that_does_not_end_is_broken_off() -> None:
    ran = await running.run(["sh", "-c", "echo begun; sleep 600"], seconds=0.3)
    assert (ran.ended, ran.stdout) == ("running", b"begun\n")


async def test_output_without_end_is_a_flood() -> None:
    """It is broken off after some megabytes, of which the last are kept."""
    ran = await running.run(["yes"], seconds=20)
    assert ran.ended == "flood"
    assert len(ran.stdout) <= running.FLOOD_BYTES


async def test_an_answer_that_is_complete_is_enough() -> None:
    ran = await running.run(["sh", "-c", "echo answer; sleep 600"], seconds=20, complete=lambda text: b"answer" in text)
    assert (ran.ended, ran.stdout) == ("ended", b"answer\n")


@pytest.mark.parametrize(
    ("printed", "ended"),
    [
        (lines({"type": "stdout", "data": "a\n"}, {"type": "exit", "code": 0}), "ended"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "timeout"}), "timed_out"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "resource_limit", "reason": "CPU"}), "stopped"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "error", "message": "no"}), "failed"),
        (b"Traceback", "failed"),
    ],
)
def test_events_of_sandbox_runtime(printed: bytes, ended: Ended) -> None:
    """A limit that it reports is told from a program's end and from a sandbox that never ran."""
    seen = RUNTIME.read(Ran(ended="ended", stdout=printed))
    assert seen.ended == ended
    assert seen.stdout == ("a\n" if b"a\\n" in printed else "")


@pytest.mark.parametrize(
    ("problem", "ended"),
    [("", "ended"), ("SandboxTimeoutError: after 1.0 seconds", "timed_out"), ("APIError: no image", "failed")],
)
def test_results_of_llm_sandbox(problem: str, ended: Ended) -> None:
    """Only its own timeout is one; every other exception means that nothing was tried."""
    printed = lines({"stdout": "a\n", "stderr": "", "code": 0, "problem": problem})
    assert LLM.read(Ran(ended="ended", stdout=b"noise\n" + printed)).ended == ended


def test_results_of_mcp_run_python() -> None:
    content = json.dumps({"status": "run-error", "output": ["a"], "error": "NameError: x"})
    printed = lines({"id": 1, "result": {}}, {"id": 2, "result": {"content": [{"type": "text", "text": content}]}})
    seen = PYODIDE.read(Ran(ended="ended", stdout=printed))
    assert (seen.ended, seen.stdout, seen.stderr) == ("ended", "a\n", "NameError: x")
    assert PYODIDE.read(Ran(ended="ended", stderr=b"no deno")).ended == "failed"


def test_what_is_granted_is_the_same_everywhere() -> None:
    options = Docker("image", "0", hardened=True).options(LIMITS)
    assert {str(LIMITS.pids), f"{LIMITS.memory_bytes}b", "none", "ALL"} <= set(options)
    assert Docker("image", "0", hardened=False).options(LIMITS) == []
    settings = LLM.settings(LIMITS)
    assert (settings["mem_limit"], settings["pids_limit"]) == (LIMITS.memory_bytes, LIMITS.pids)
    job = json.dumps(RUNTIME.job("true", LIMITS, scratch="/scratch", workspace="/w"))
    assert f'"max_memory_mb": {LIMITS.memory_bytes // 2**20}' in job
    assert f'"timeout_seconds": {int(LIMITS.wall_seconds)}' in job
