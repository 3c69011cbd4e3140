"""The tools on offer: one file each. A tool is a name, two models and a job; what it may do is its profile's matter."""

from collections.abc import Mapping

from server.tools.base import Tool
from server.tools.run_python import RUN_PYTHON

TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (RUN_PYTHON,)}
"""By name."""
