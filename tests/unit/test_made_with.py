"""What a sandbox is made with, by names that say where the host has each from."""

from types import SimpleNamespace
from typing import Any

from tests.fixtures import receipt_fields

from glovebox_sandboxes.contract.attestation import made_with


def test_every_part_is_in_the_docs_with_whoever_observed_it() -> None:
    """A digest that nobody measured is called declared."""
    driver: Any = SimpleNamespace(capabilities=SimpleNamespace(version="bwrap 0.8"))
    plan: Any = SimpleNamespace(action={"runtime": "sha256:r", "Image": "sha256:i", "seccomp": "sha256:s"})
    parts = made_with(driver, plan)
    assert parts.keys() == {name for name, _, _ in receipt_fields.HOST}
    assert parts["runtime_declared"] == "sha256:r"
    assert "runtime" not in parts
