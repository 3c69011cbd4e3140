"""Which programs get a sandbox with the preloaded modules: a guess, and a wrong one costs time alone."""

import pytest

from glovebox_sandboxes.pool.pool import MAX_SCANNED, needs_preload

PRELOAD = ("numpy", "matplotlib.pyplot")


@pytest.mark.parametrize(
    "code",
    [
        "",
        "print(1)",
        "import os",
        "import os, json as j, sys",
        "import os.path; import sys  # and no more",
        "from collections import Counter",
        "from collections import (\n    Counter,\n)",
        "from __future__ import annotations\nimport csv",
        "def f():\n\timport heapq\n\tyield from f()",
        "important = from_here = 1",
        "import os \\\n , sys",
        "try:\n    f()\nexcept OSError as e:\n    raise KeyError from None\nimport os",
    ],
)
def test_a_program_of_the_standard_library_alone_does_without(code: str) -> None:
    """However it imports it."""
    assert not needs_preload(code, PRELOAD)


@pytest.mark.parametrize(
    "code",
    [
        "import numpy",
        "import numpy as np",
        "import os, numpy",
        "from numpy.linalg import norm",
        "import matplotlib",
        "__import__('numpy')",
        "import importlib\nimportlib.import_module('matplotlib.cm')",
        "import seaborn",  # what it imports in turn is not known
        "import os, seaborn",
        "import os; import seaborn",
        "from seaborn.utils import x",
        "from . import helper",
        "from .helper import x",
        "try:\n    import seaborn\nexcept ImportError: pass",
        "import os, \\\n    seaborn",
        "import os \\\n , seaborn",
        "import\\\n seaborn",
        "from \\\n seaborn import x",
        "from.helper import x",
        "# what comes from csv\nimport seaborn as sns",
        "raise E from copy\nimport seaborn",
        "import runpy\nrunpy.run_path('report.py')",
        "exec(open('report.py').read())",
        "import pickle\npickle.load(open('frame', 'rb'))",
        "x = 1  # numpy would be nice",
        f"{'#' * MAX_SCANNED}\n",
    ],
)
def test_whatever_may_want_them_gets_them(code: str) -> None:
    """Named anywhere, imported by what is imported, or not looked at."""
    assert needs_preload(code, PRELOAD)


@pytest.mark.parametrize(
    "piece", ["from ", "import ", "from a ", "import a,", "from\t\n", "import", "from a\nimport", " "]
)
def test_a_scan_is_short_whatever_it_looks_at(piece: str) -> None:
    """In proportion to the text: the longest takes milliseconds, and the test's own limit is never near."""
    needs_preload((piece * MAX_SCANNED)[:MAX_SCANNED], PRELOAD)
