"""Plain Python functions of the user's: found by path, and handed the columns that their parameters name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def load_file(path: str, *, setting: str) -> ModuleType:
    """Runs a Python file as a module of its own; `sys.path` stays as it is, so it imports installed packages only.

    Raises:
        ValueError: there is no such file, or it raises while it runs (chained); `setting` names what to mend.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{setting}='{path}': no such file (looked from {Path.cwd()})")
    name = f"{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{setting}='{path}' is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{setting}='{path}' could not be imported: {type(error).__name__}: {error}") from error
    return module


def load_function(target: str, *, setting: str) -> Callable[..., Any]:
    """The function at "package.module.function" or "path/to/file.py:function".

    Raises:
        ValueError: no such file, module or function, or the import raised.
    """
    if ".py:" in target:
        path, _, name = target.rpartition(":")
        module = load_file(path, setting=setting)
    else:
        module_name, _, name = target.rpartition(".")
        if not module_name:
            raise ValueError(f"{setting}='{target}' must be 'package.module.function' or 'path/file.py:function'")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(f"{setting}='{target}' could not be imported: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isfunction(value)))
        raise ValueError(f"{setting}='{target}': no function '{name}' there, only: {known or 'none'}")
    return function


def by_name(
    function: Callable[..., Any], *, given: tuple[str, ...], setting: str, may_be_async: bool = False
) -> Callable[..., Any]:
    """Adapts a function to the call `(row, **given)`: its parameters are filled by name, from `given`, then the row.

    A parameter `**columns` gets the rest of the row; what the function does not name, it is not handed.

    Example: `def reward_fn(messages, answer, difficulty=1)` with `given=("messages",)` takes `answer` and, where the
    data has it, `difficulty` from the row.

    Raises:
        ValueError: at once for parameters without usable names, and for a coroutine function unless `may_be_async`; at
            a call for a row without a column that the function needs.
    """
    name = f"{setting} {getattr(function, '__name__', type(function).__name__)}"
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise ValueError(f"{name} is a coroutine function; make it a plain one (calls run side by side in threads)")
    parameters = inspect.signature(function).parameters.values()
    if odd := [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise ValueError(f"{name}: parameter '{odd[0]}' cannot be given by name; write it as a plain parameter")
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p.default is not p.empty for p in parameters if p.kind is not p.VAR_KEYWORD}

    def call(row: Mapping[str, Any], **values: Any) -> Any:
        arguments: dict[str, Any] = {}
        for parameter, has_default in named.items():
            source = values if parameter in given else row
            if parameter in source:
                arguments[parameter] = source[parameter]
            elif not has_default:
                raise ValueError(f"{name} wants the column '{parameter}', the row has only: {', '.join(sorted(row))}")
        if takes_rest:
            arguments |= {key: value for key, value in row.items() if key not in arguments and key not in given}
        return function(**arguments)

    return call
