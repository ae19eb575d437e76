"""Parts of torch that serving does not touch are imported when something does, instead of with torch.

A third of the processor time that importing torch takes goes to operations written in Python for its compilers, to
shapes without values, and to probability distributions, masked tensors and data loaders. Each of these is there after
`import torch`, empty: the first attribute that is asked of it loads it, in place. The registrations of shapes are
loaded by whatever imports what they stand for (`_REFERENCES`) as well, before it, in the order that torch keeps.

What a release of torch imports in which order is its own affair, so only those of `CHECKED` are changed; any other is
imported whole. Until something loads the registrations, operations on the device `meta` that torch has no C++ shape
function for raise NotImplementedError: see `load_shape_functions`.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

CHECKED = ("2.15",)
"""Releases of torch that `tests/tandem_worker/host/test_postponed.py` has passed with."""
_SHAPES = ("torch._meta_registrations", "torch.distributed._meta_registrations")
POSTPONED = (*_SHAPES, "torch.distributions", "torch.masked", "torch.utils.data")
_REFERENCES = frozenset({"torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"})
"""What the registrations of shapes import, and is imported with torch through them alone. Some of it finds others half
loaded in any other order."""
_WAIT_SECONDS = 60.0
_lock = threading.RLock()
"""Held by the thread that loads a module. It is no lock of the import system's, which sees no circle through it: hence
the limit."""


class Postponed(ModuleType):
    """A module that is loaded when it is first asked for something."""

    def __getattr__(self, name: str) -> Any:
        load(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        load(self)
        return dir(self)


def load(module: ModuleType) -> None:
    """Load a module in place, if it is still postponed.

    Raises what importing it raises; it is tried again then when it is next asked for something. Raises ImportError
    when another thread loads one and does not get on.
    """
    if not _lock.acquire(timeout=_WAIT_SECONDS):
        raise ImportError(f"{module.__name__} waits for another thread, which has imported for {_WAIT_SECONDS:g} s.")
    try:
        if not isinstance(module, Postponed):
            return
        logger.info("importing %s, which serving was not expected to need", module.__name__)
        object.__setattr__(
            module, "__class__", ModuleType
        )  # what it imports may look at it while it is half loaded, as at any module
        try:
            importlib.reload(module)
        except BaseException:
            module.__class__ = Postponed
            raise
    finally:
        _lock.release()


class _Loader:
    """Makes an empty module of what another loader would load."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # A submodule is found by its package's path: asked for it, the package is loaded first.
        module.__dict__.pop("__path__", None)
        module.__class__ = Postponed


class _Loaded:
    """Finds that a module has been loaded while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        # The import system goes by the spec of a module that has come while it looked: by the module's own it would
        # load it a second time.
        module.__spec__ = ModuleSpec(module.__name__, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class Finder:
    """Asked before all others where a module is: `sys.meta_path`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None leaves it to the next finder."""
        if name in _REFERENCES and _SHAPES[0] in sys.modules:
            load_shape_functions()
            module = sys.modules.get(name)
            if module is not None:
                _Loaded(module)
                return module.__spec__
            return None
        if name not in POSTPONED or target is not None:  # a target is loaded in place
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader()  # type: ignore[assignment]
        return spec


def load_shape_functions() -> None:
    """Load what computes shapes on the device `meta` where torch has no C++ function for it, if it is postponed."""
    for name in _SHAPES:
        if (module := sys.modules.get(name)) is not None:
            load(module)


def postpone_imports(environment: Mapping[str, str]) -> bool:
    """To be called before torch is imported. Returns whether parts of it are postponed.

    They are not where `TANDEM_POSTPONED_IMPORTS` is 0, with a release of torch that is not of `CHECKED`, and where
    torch has been imported already; all but the first are said in the log.
    """
    if environment.get("TANDEM_POSTPONED_IMPORTS", "1") == "0" or any(isinstance(one, Finder) for one in sys.meta_path):
        return False
    release = _observe_release()
    if "torch" in sys.modules or release not in CHECKED:
        logger.info("torch %s is imported whole; parts are left for later of %s", release, ", ".join(CHECKED))
        return False
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    return True


def _observe_release() -> str | None:
    """Release of the torch that would be imported, for example `2.15`. Its metadata would take longer to find."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"__version__ = '(\d+\.\d+)", text)
    return None if found is None else found[1]
