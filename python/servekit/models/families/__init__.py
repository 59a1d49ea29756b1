"""The families of generating models: every module here has a `FAMILY` and is found by being here."""

from __future__ import annotations

import importlib
import pkgutil

from servekit.models.decoder import Family


def all_families() -> list[Family]:
    """Every family, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
