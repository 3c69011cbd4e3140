"""The tools: texts, models and needs of each, in a module of this folder.

A tool's rights are in its profile.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from glovebox_server.tools.base import Tool

_MODULES = (import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__))
_ALL = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Tool)]

TOOLS: Final[Mapping[str, Tool]] = {tool.name: tool for tool in sorted(_ALL, key=lambda tool: tool.name)}
