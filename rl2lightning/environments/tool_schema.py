"""JSON schemas of typed Python functions, and the check of a model's arguments against them."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

Schema = dict[str, Any]

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_NAMES = {"string": str, "boolean": bool, "object": Mapping, "array": (list, tuple), "null": type(None)}


def function_schema(function: Callable[..., Any], *, name: str | None = None) -> Schema:
    """The schema of a function as chat templates expect it, from its annotations and its docstring.

    Annotations: str, int, float, bool, list[…], dict[str, …], Literal[…], unions and None. Of the docstring, the text
    before `Args:` describes the function, the lines under it (`name: what it is.`) the parameters.

    Example: `def add(a: int, b: int = 0)` gives the parameters
    `{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}`.

    Raises:
        ValueError: a parameter without annotation, of a type that JSON lacks, or that has no name of its own (*args).
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    description, about = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except NameError as error:
        raise ValueError(f"tool '{name}': {error}; annotate its parameters with names that the file knows") from error
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool '{name}': parameter '{parameter}' cannot be given by name; make it a plain one")
        if parameter.name not in hints:
            raise ValueError(f"tool '{name}': parameter '{parameter.name}' needs a type, such as {parameter.name}: str")
        schema = _schema_of(hints[parameter.name], where=f"tool '{name}': parameter '{parameter.name}'")
        if parameter.name in about:
            schema["description"] = about[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says of the function, and of each parameter."""
    before, _, after = text.partition("\nArgs:\n")
    summary = re.split(r"\n(?:Returns|Raises|Example|Examples):", before)[0].strip()
    about: dict[str, str] = {}
    current, indent = None, 0
    for line in after.splitlines():
        if line and not line[0].isspace():  # the next section
            break
        found = re.match(r"(\s+)(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if found and (current is None or len(found[1]) <= indent):
            indent, current = len(found[1]), found[2]
            about[current] = found[3].strip()
        elif current is not None and line.strip():  # goes on from the line before
            about[current] = f"{about[current]} {line.strip()}".strip()
    return summary, about


def _schema_of(hint: Any, *, where: str) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(argument, where=where) for argument in arguments]}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema_of(arguments[0], where=where)}
    if origin in (dict, Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], where=where)}
    raise ValueError(
        f"{where} has the type {hint}, which a model cannot write in JSON; "
        "use str, int, float, bool, list[…], dict[str, …], Literal[…] or a union of them"
    )


def check_arguments(schema: Schema, arguments: Any) -> str | None:
    """What is wrong with the arguments of a call, in words for the model; None if they fit the function's schema."""
    parameters = schema["function"].get("parameters") or {}
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {_shown(arguments)}"
    properties = parameters.get("properties", {})
    expected = ", ".join(properties) or "none"
    if unknown := [key for key in arguments if key not in properties]:
        return f"unknown argument '{unknown[0]}' (expected: {expected})"
    if missing := [key for key in parameters.get("required", ()) if key not in arguments]:
        return f"missing argument '{missing[0]}' (expected: {expected})"
    for key, value in arguments.items():
        if not _fits(properties[key], value):
            return f"argument '{key}' must be {_words(properties[key])}, not {_shown(value)}"
    return None


def _fits(schema: Schema, value: Any) -> bool:
    if "anyOf" in schema:
        return any(_fits(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return True
    if kind in ("integer", "number"):  # True is an int to Python, not to anyone else
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    if not isinstance(value, _NAMES[kind]):
        return False
    if kind == "array" and "items" in schema:
        return all(_fits(schema["items"], item) for item in value)
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return all(_fits(schema["additionalProperties"], item) for item in value.values())
    return True


def _words(schema: Schema) -> str:
    """A schema in words: "an integer", "one of 'a', 'b'", "an array of strings"."""
    if "anyOf" in schema:
        return " or ".join(_words(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    kind = schema.get("type", "anything")
    items = schema.get("items", {}).get("type")
    if kind == "array" and items:
        return f"an array of {items}s"
    return kind if kind in ("null", "anything") else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:60] + "…"
