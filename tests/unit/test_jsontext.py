"""The wire's JSON where nobody imported the standard library's package, as in the guest."""

import subprocess  # noqa: TID251 - an interpreter of its own, because this one has imported json long ago
import sys
from pathlib import Path

PROGRAM = """
import sys
from sandboxes.jsontext import loads
assert loads('{"a":[1]}') == {"a": [1]}, "control: it reads JSON"
for text in ('', '{', '{"a":1', '{"a" 1}', '{"a":1,}', '[1', '[1,]', '"a', '"\\\\x"', '"\\n"', 'nul', '1 2', 'NaN'):
    try:
        loads(text)
    except ValueError:
        continue
    raise SystemExit(f"{text!r} was read")
assert "json" not in sys.modules, "the package came in, so this proves nothing"
"""


def test_what_is_not_json_is_a_value_error_without_the_package_too() -> None:
    """Found by fuzzing: the C scanner alone ends in SystemError, which no reader of the wire expects."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
