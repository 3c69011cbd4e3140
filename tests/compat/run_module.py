"""Run one module of CPython's regression tests, in a sandbox or on the host, and write each test's outcome.

``compat.py`` puts one line before this text. It names ``MODULE``, ``TREE`` (the folder of the package ``test``),
``PLACE`` (a working directory) and ``RESULTS`` (a file). Each test gets a JSON list there: name, outcome, last line of
its error. A test that ends the interpreter has the outcome ``started`` alone.
"""

# ruff: noqa: F821 - the names of that line
# mypy: disable-error-code="name-defined"

import importlib
import io
import json
import os
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any


class OutcomeWriter(unittest.TextTestResult):
    """Write each outcome at once, so that a test that crashes leaves those before it."""

    def _write(self, test: Any, outcome: str, text: str = "") -> None:
        lines = text.strip().splitlines() or [""]
        record.write(json.dumps([test.id(), outcome, lines[-1][:300]]) + "\n")
        record.flush()

    def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's, as are those below
        super().startTest(test)
        self._write(test, "started")

    def addSuccess(self, test: Any) -> None:  # noqa: N802 - see startTest
        self._write(test, "passed")

    def addExpectedFailure(self, test: Any, _err: Any) -> None:  # noqa: N802 - see startTest
        self._write(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802 - see startTest
        self._write(test, "failed", "unexpected success")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802 - see startTest
        self._write(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802 - see startTest
        self._write(test, "failed", "".join(traceback.format_exception_only(*err[:2])))

    addFailure = addError  # noqa: N815 - see startTest

    def addSubTest(self, test: Any, _subtest: Any, err: Any) -> None:  # noqa: N802 - see startTest
        if err is not None:
            self._write(test, "failed", "".join(traceback.format_exception_only(*err[:2])))


Path(PLACE).mkdir(exist_ok=True)
os.chdir(PLACE)
sys.path.insert(0, TREE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TREE, os.environ.get("PYTHONPATH"))))  # for child interpreters
support = importlib.import_module("test.support")
support.use_resources = []  # type: ignore[attr-defined] # none: no network, no display, nothing that takes minutes
with Path(RESULTS).open("w", encoding="utf-8") as record:
    try:
        if MODULE == "test_threading":
            # Its child imports the suite in isolated mode, finds it nowhere, and waits for good, on the host too.
            del importlib.import_module("test.test_threading").ThreadJoinOnShutdown.test_4_daemon_threads
        suite = unittest.defaultTestLoader.loadTestsFromName(f"test.{MODULE}")
        unittest.TextTestRunner(stream=io.StringIO(), resultclass=OutcomeWriter).run(suite)  # type: ignore[arg-type]
    except unittest.SkipTest as skipped:
        record.write(json.dumps([MODULE, "skipped", str(skipped)[:300]]) + "\n")
    except Exception as error:  # noqa: BLE001 - the module's own, when it is imported
        record.write(json.dumps([MODULE, "failed", repr(error)[:300]]) + "\n")
    record.write(json.dumps([MODULE, "ended", ""]) + "\n")
