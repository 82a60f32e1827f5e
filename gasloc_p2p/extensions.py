"""A person's own outer rules, topologies, codecs and optimizers, from Python files of theirs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gasloc_p2p.core.errors import ConfigError, GaslocError

_LOADED: set[str] = set()
"""Names under which extensions are in `sys.modules`."""


def load_extensions(names: Sequence[str]) -> tuple[str, ...]:
    """Import Python files and modules, each once per process, and return their names.

    Args:
        names: paths that end in `.py`, relative to the current folder, `~` for the home folder; or
            dotted names of modules that Python can import.

    Returns:
        The names, paths made absolute.

    Raises:
        ConfigError: one is missing, is not valid Python, or raises an exception.
    """
    return tuple(_load(name) for name in names)


def place_of(error: BaseException) -> str | None:
    """Return the file and line of an extension in which `error` arose; None if it did not."""
    places = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in _LOADED
    ]
    return places[-1] if places else None


def _load(name: str) -> str:
    if not name.endswith(".py"):
        _LOADED.add(name)
        with _explained(name, module=name):
            importlib.import_module(name)
        return name
    path = Path(os.path.expanduser(name)).resolve()
    # Files in different folders may be called alike.
    module = f"gasloc_extension_{hashlib.sha256(bytes(path)).hexdigest()[:16]}"
    if module not in sys.modules:
        _LOADED.add(module)
        with _explained(str(path), module=module):
            _run(path, module)
    return str(path)


def _run(path: Path, module: str) -> None:
    """Import the file `path` as `module`."""
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    # Dataclasses look their module up while it is still being run.
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
    except BaseException:  # whatever ends it, it has not been imported
        del sys.modules[module]
        raise


@contextmanager
def _explained(source: str, *, module: str) -> Iterator[None]:
    """Turn whatever a person's file raises into an error that names its line."""
    try:
        yield
    except GaslocError as error:
        raise ConfigError(
            f"{_place(error, source, module)}: {error.what}", why=error.why, fix=error.fix
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"the extension {_place(error, source, module)} cannot be loaded",
            why=str(error),
            fix="correct its path in node.extensions, which starts from the current folder",
        ) from error
    except (Exception, SystemExit) as error:  # a person's file may raise anything
        raise ConfigError(
            f"the extension {_place(error, source, module)} cannot be loaded",
            why=f"{type(error).__name__}: {error}",
            fix="mend it, or take it out of node.extensions",
        ) from error


def _place(error: BaseException, source: str, module: str) -> str:
    """Return the file and the last line of `module` that led to `error`; `source` if none did."""
    places = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == module
    ]
    if isinstance(error, SyntaxError) and not places:
        return f"{error.filename}, line {error.lineno}"
    return places[-1] if places else source
