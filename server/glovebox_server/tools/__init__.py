"""The tools on offer: one file each. A tool is a name, two models and a job; what it may do is its profile's matter."""

from collections.abc import Mapping

from glovebox_server.tools.base import Tool
from glovebox_server.tools.fetch_url import FETCH_URL
from glovebox_server.tools.list_workspace_files import LIST_WORKSPACE_FILES
from glovebox_server.tools.read_workspace_file import READ_WORKSPACE_FILE
from glovebox_server.tools.run_python import RUN_PYTHON
from glovebox_server.tools.search_workspace import SEARCH_WORKSPACE

TOOLS: Mapping[str, Tool] = {
    tool.name: tool for tool in (FETCH_URL, LIST_WORKSPACE_FILES, READ_WORKSPACE_FILE, RUN_PYTHON, SEARCH_WORKSPACE)
}
"""By name."""
