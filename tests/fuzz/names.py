"""Artifact names: what is accepted stays below its folder on every system, and looks like what it is."""

import ntpath
import posixpath
import unicodedata

from tests.fuzz.harness import bounded, text

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.names import MAX_DEPTH, MAX_NAME_BYTES, CallNames, check_name, name_risks


def _accepted(name: str) -> bool:
    try:
        check_name(name)
    except RefusedError as refused:
        said = refused.reason + refused.hint
        assert said.isprintable()
        assert len(said) < 1000
        return False
    assert len(name.encode()) <= MAX_NAME_BYTES
    assert name.count("/") < MAX_DEPTH
    for path in (posixpath, ntpath):
        assert path.normpath(path.join("base", name)) == path.join("base", *name.split("/"))
        assert not path.isabs(name)
    assert not ntpath.splitdrive(name)[0]
    assert unicodedata.normalize("NFC", name) == name
    assert name.isprintable()
    assert all(risk.isprintable() for risk in name_risks(name))
    return True


def check(data: bytes) -> None:
    """One name to a line."""
    names, taken = CallNames(), set[str]()
    with bounded():
        for name in text(data).split("\n")[:50]:
            if not _accepted(name):
                continue
            try:
                names.add(name)
            except RefusedError:
                continue
            assert name not in taken
            assert name.casefold() not in {each.casefold() for each in taken}
            taken.add(name)
