"""What a misspelt configuration key was probably meant to be, and the one line of a parser's error that says it."""

from __future__ import annotations

import argparse
import difflib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args, get_origin

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_MARK = "; did you mean"
_UNKNOWN_KEY = (
    r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'",
    r"Subcommand '\w+' does not accept option '(?P<key>[\w.]+)'",
    r"Option '(?P<key>[\w.]+)' is not accepted",
    r"unrecognized arguments: --(?P<key>[\w.]+).*",
)
_UNKNOWN_CLASS = (
    r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'",
    r"Expected a dot import path string: (?P<name>\w+)",
)
_HELP_ALONE = r"unrecognized arguments: --[\w.]+\.help\b.*"
_TELLING = "Got value:|not correspond to a subclass|arguments are required|has no attribute|No module named"


def suggest(message: str, parser: ArgumentParser) -> str:
    """The message, with "did you mean" behind the first unknown key or class that resembles a known one.

    Example: "Option 'sample_per_prompt' is not accepted" of the parser for GRPO's arguments becomes "Option
    'sample_per_prompt' is not accepted; did you mean 'samples_per_prompt'?".
    """
    if _MARK in message:
        return message  # the parser of the class in question, further in, knew more than this one
    if match := re.search(_HELP_ALONE, message):
        example = "--model.help GRPO --model.policy_loss.help GSPO"
        return f"{message[: match.end()]}{_MARK} to name the class around it first, as in {example}?"
    for pattern in _UNKNOWN_KEY:
        for match in re.finditer(pattern, message):
            names = match.groupdict()
            key = ".".join(name for name in (names.get("group"), names["key"]) if name)
            if close := _similar_key(key, set(_keys(parser))):
                return f"{message[: match.end()]}{_MARK} '{close}'?{message[match.end() :]}"
    for pattern in _UNKNOWN_CLASS:
        for match in re.finditer(pattern, message):
            names = match.groupdict()
            if close := difflib.get_close_matches(names["name"], _class_names(names.get("module")), n=1):
                return f"{message[: match.end()]}{_MARK} '{close[0]}'?{message[match.end() :]}"
    return message


def shorten(message: str) -> str:
    """The line that says what is wrong, with the class and key it is about, where there is no doubt which one it is.

    A parser that was offered a union of types reports on each of them, and prints the value it was given.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    telling = [i for i, line in enumerate(lines) if _MARK in line][:1]
    telling = telling or [i for i, line in enumerate(lines) if re.search(_TELLING, line)]
    if not telling and "Errors:" in lines:  # what a class raised when it was made: the first type is the likeliest
        start = len(lines) - lines[::-1].index("Errors:")
        telling = [i for i in range(start, len(lines)) if not lines[i].startswith("Expected a <class")][:1]
    if len(telling) != 1:
        return message
    first = telling[0]
    owners = [m[1] for line in lines[:first] if (m := re.match(r"Problem with given class_path '([\w.]+)'", line))]
    near = lines[first - 1 : first] if owners else lines[:1]
    keys = [m[1] for line in near if (m := re.match(r'Parser key "([\w.]+)"', line))]
    line = lines[first]
    if line.endswith(":") and first + 1 < len(lines):  # the cause stands below
        line = f"{line} {lines[first + 1]}"
    return ": ".join([*owners[-1:], *keys, line])


def _keys(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Dotted names of all arguments, those of the subcommands and of the classes that may be chosen too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _keys(subparser)
        else:
            yield action.dest
            for name in _fields(getattr(action, "_typehint", None)):
                yield f"{action.dest}.{name}"


def _fields(typehint: Any) -> Iterator[str]:
    """Names of the arguments of our classes that a type allows, of all of its subclasses."""
    for part in get_args(typehint):
        yield from _fields(part)
    if inspect.isclass(typehint) and get_origin(typehint) is None and typehint is not object:
        if typehint.__module__.startswith("rl2lightning."):
            parameters = inspect.signature(typehint).parameters.values()
            yield from (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        for subclass in type.__subclasses__(typehint):
            yield from _fields(subclass)


def _similar_key(key: str, known: Iterable[str]) -> str | None:
    """`key` with its first unknown part replaced by the closest of what could stand there, or a key of about that name.

    A key that is spelt right and only stands at the wrong place comes before others that resemble it.
    """
    parts, paths = key.split("."), [name.split(".") for name in known]
    for depth, part in enumerate(parts):
        siblings = {path[depth] for path in paths if len(path) > depth and path[:depth] == parts[:depth]}
        if part in siblings:
            continue
        if depth == len(parts) - 1 and (elsewhere := _named(part, known)):
            return elsewhere
        if close := difflib.get_close_matches(part, sorted(siblings | {"class_path", "init_args"}), n=1):
            return ".".join([*parts[:depth], close[0]])
        break
    below = {path[-1] for path in paths if path[: len(parts) - 1] == parts[:-1]}
    close = difflib.get_close_matches(parts[-1], sorted(below), n=1, cutoff=0.8)
    return _named(parts[-1], known) or (_named(close[0], known) if close else None)


def _named(name: str, known: Iterable[str]) -> str | None:
    """The key of that name that is nearest to the top."""
    found = [key for key in known if key.endswith(f".{name}")]
    return min(found, key=lambda key: (key.count("."), len(key), key), default=None)


def _class_names(module: str | None) -> list[str]:
    """What a module offers; without one, our classes and Lightning's callbacks, which may go by their short names."""
    if module is not None:
        found = sys.modules[module]
        return [*dir(found), *(m.name for m in pkgutil.iter_modules(getattr(found, "__path__", ())))]
    loaded = [m for name, m in sys.modules.items() if name.startswith(("rl2lightning.", "lightning.pytorch.callbacks"))]
    return sorted({name for m in loaded for name, x in vars(m).items() if inspect.isclass(x)})
