"""The wire's JSON where nobody imported the standard library's package, as in the guest."""

import json
import subprocess  # noqa: TID251 - an interpreter of its own, because this one has imported json long ago
import sys
from pathlib import Path

import pytest

from _glovebox_guest.jsontext import dumps, loads

PROGRAM = """
import sys
from _glovebox_guest.jsontext import loads
assert loads('{"a":[1]}') == {"a": [1]}, "control: it reads JSON"
for text in ('', '{', '{"a":1', '{"a" 1}', '{"a":1,}', '[1', '[1,]', '"a', '"\\\\x"', '"\\n"', 'nul', '1 2', 'NaN'):
    try:
        loads(text)
    except ValueError:
        continue
    raise SystemExit(f"{text!r} was read")
# Since Python 3.13 the C scanner itself imports the package, to raise its error.
assert sys.version_info >= (3, 13) or "json" not in sys.modules, "the package came in, so this proves nothing"
"""


def test_what_is_not_json_is_a_value_error_without_the_package_too() -> None:
    """Found by fuzzing: the C scanner alone ends in SystemError, which no reader of the wire expects."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["1e999", "-1e309", '{"a":[1.5,1e400]}', "9" * 400 + ".0"])
def test_a_number_that_would_be_read_as_infinity_is_refused(text: str) -> None:
    """Found by fuzzing: what was read could not be written again. The standard library reads it (control)."""
    assert "inf" in repr(json.loads(text))
    with pytest.raises(ValueError, match="is too large"):
        loads(text)


@pytest.mark.parametrize("text", ["1.7976931348623157e308", "-0.0", "1e-999", "[0.1,2.50,3e2]"])
def test_numbers_that_a_double_holds_are_read_as_ever(text: str) -> None:
    """The control: the same values, written again as the same."""
    assert repr(loads(text)) == repr(json.loads(text))
    assert repr(loads(dumps(loads(text)).decode())) == repr(loads(text))
