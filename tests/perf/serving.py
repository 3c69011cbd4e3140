"""``python -m tests.perf.serving FILE serve …``: ``glovebox serve …`` that times the parts of each call into FILE.

Never imported by anything else.
"""

import sys
from pathlib import Path

from tests.perf import spans

from glovebox_server.cli.main import main

if __name__ == "__main__":
    with spans.recorded(Path(sys.argv.pop(1))):
        main()
