"""What every fuzz target shares: the list of them, how a target is found, cutting bytes, and a bound on time.

A target is a module of this directory with ``check(data)``: it raises on a finding and returns on anything else. It
knows nothing of a fuzzer, so that kept inputs are replayed without one.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
"""One directory for each target; ``found-…`` are inputs that once showed a defect."""
TARGETS = (
    "wire", "results", "jsontext", "strict_json", "egress", "hello", "profile", "policy", "names", "media",
    "patches", "audit_log", "audit_line", "segment_proof", "receipt", "seccomp", "page", "http1", "decode", "proxy",
    "tls",
)  # fmt: skip
MAX_SECONDS = 2.0
"""Processor time for one input, instrumented and on a busy machine. Inputs are 64 KiB at most and take milliseconds."""

Check = Callable[[bytes], None]


def load(target: str) -> Check:
    """The target's ``check``."""
    check: Check = importlib.import_module(f"tests.fuzz.{target}").check
    return check


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """The same bytes in pieces of ``size``; as a whole for 0."""
    step = size or max(1, len(data))
    yield from (data[at : at + step] for at in range(0, len(data), step))


def text(data: bytes) -> str:
    """Any bytes as text, lone surrogates included."""
    return data.decode("utf-8", "surrogateescape")


@contextmanager
def bounded() -> Iterator[None]:
    """Fail on an input that takes long: a hang that ends is a finding, too."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < MAX_SECONDS, f"{took:.1f} s of processor time for one input"
