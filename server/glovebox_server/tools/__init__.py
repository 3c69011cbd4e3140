"""The tools: one module of this folder each, with its texts, its models and its needs, as ``TOOL``.

A tool's rights are in its profile.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from glovebox_server.tools.base import Tool

_MODULES = (import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__))

TOOLS: Final[Mapping[str, Tool]] = {module.TOOL.name: module.TOOL for module in _MODULES if hasattr(module, "TOOL")}
"""By name, in alphabetical order."""
