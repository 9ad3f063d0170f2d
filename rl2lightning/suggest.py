"""What a misspelt configuration key was probably meant to be, and the one line of a parser's error that says it."""

from __future__ import annotations

import argparse
import dataclasses
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
_SAID = rf"{_MARK}|; it takes |' is no (?:known )?\w+[:;]"  # what a parser further in has said already
_EXAMPLE = "give its settings, as in --"
_AT_MOST = 20  # names in a list; beyond, nobody reads it
# what things go by elsewhere: the first of these names that all exist where the other one was refused
_ALIASES = {
    "DPO": ("'Sigmoid'",),
    "RPO": ("'Sigmoid' with nll_coef 1", "'DPO' with preference_loss.nll_coef 1"),
    "prompt_key": ("'messages_key'",),
    "updates_per_rollout": ("'epochs' and 'mini_batches'",),
}
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
_REFUSED_VALUE = (
    r"Expected a dot import path string: (?P<value>\w+)",
    r"Not a valid subclass of \w+\b(?=(?:.*\n)*\s*Given value: (?P<value>\w+)$)",
)
_OWNER = r"Problem with given class_path '([\w.]+)'"
_KEY = r'Parser key "([\w.]+)"'
_HELP_ALONE = r"unrecognized arguments: --[\w.]+\.help\b.*"
_TELLING = "Got value:|not correspond to a subclass|arguments are required|has no attribute|No module named"


def suggest(message: str, parser: ArgumentParser) -> str:
    """The message, with what was probably meant behind the first unknown key or class; failing that, what there is.

    Example: "Option 'sample_per_prompt' is not accepted" of the parser for GRPO's arguments becomes "Option
    'sample_per_prompt' is not accepted; did you mean 'samples_per_prompt'?".
    """
    outer = re.match(_KEY, message)
    if re.search(_SAID, message):  # the parser of the class in question, further in, knew more than this one
        return message.replace(_EXAMPLE, f"{_EXAMPLE}{outer[1]}.") if outer else message
    if match := re.search(_HELP_ALONE, message):
        example = "--model.help GRPO --model.policy_loss.help GSPO"
        return f"{message[: match.end()]}{_MARK} to name the class around it first, as in {example}?"
    return _with_key(message, parser) or _with_class(message, parser) or message


def _with_key(message: str, parser: ArgumentParser) -> str | None:
    """The message with the key that was meant by one that was refused, or with those that there are."""
    matches = [match for pattern in _UNKNOWN_KEY for match in re.finditer(pattern, message)]
    # the chosen class has looked among its own settings; those of the classes beside it are of no use
    outer = re.match(_KEY, message) if re.search(_OWNER, message) else None
    known = {key for key in _keys(parser) if outer is None or not f"{key}.".startswith(f"{outer[1]}.")}
    for match in matches:
        names = match.groupdict()
        key = ".".join(name for name in (names.get("group"), names["key"]) if name)
        close = _alias(key, known)
        if close is None:
            # elsewhere a setting of just this name may be meant, not one that resembles it
            similar = _similar_key(key, known) if outer is None else _named(key.split(".")[-1], known)
            close = f"'{similar}'" if similar else None
        if close:
            return f"{message[: match.end()]}{_MARK} {close}?{message[match.end() :]}"
    if matches and parser.exit_on_error and (there_are := _settings(message[: matches[0].start()], parser)):
        end = matches[0].end()
        return f"{message[:end]}; it takes {there_are}{message[end:]}"
    return None


def _settings(before: str, parser: ArgumentParser) -> str | None:
    """The settings of the class that the lines before an error are about, or how to list them where they are many."""
    keys, owners = re.findall(_KEY, before), re.findall(_OWNER, before)
    if not owners or len(keys) != len(owners):
        return None
    module, _, name = owners[-1].rpartition(".")
    inner = type(parser)(exit_on_error=False)
    inner.add_class_arguments(getattr(sys.modules[module], name))
    names = list(dict.fromkeys(key.split(".")[0] for key in _keys(inner) if key != "help"))
    if len(names) <= _AT_MOST:
        return ", ".join(names) or "no settings"
    levels = [f"--{'.'.join(keys[: i + 1])}.help {owner.split('.')[-1]}" for i, owner in enumerate(owners)]
    return f"what {' '.join(levels)} lists"


def _with_class(message: str, parser: ArgumentParser) -> str | None:
    """The message with the class that was meant by a name that was refused, or with those that there are."""
    for pattern in _REFUSED_VALUE:
        for match in re.finditer(pattern, message):
            keys = re.findall(_KEY, message[: match.start()])
            expected = _classes(_typehint(keys[0], parser)) if len(keys) == 1 else []
            if expected and (said := _refusal(match["value"], keys[0], expected)):
                return f"{message[: match.start()]}{said}{message[match.end() :]}"
    for pattern in _UNKNOWN_CLASS:
        for match in re.finditer(pattern, message):
            names = match.groupdict()
            if close := _similar_name(names["name"], _class_names(names.get("module"))):
                return f"{message[: match.end()]}{_MARK} '{close}'?{message[match.end() :]}"
    return None


def _refusal(value: str, key: str, expected: list[type]) -> str | None:
    """What to say of a value in the place of one of these classes, the first of which a setting is typed as."""
    base = expected[0]
    if len(expected) == 1:
        fields = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
        examples = [f"{field.name} {field.default}" for field in fields if type(field.default) in (int, float)]
        return f"'{value}' is no {base.__name__}: {_EXAMPLE}{key}.{examples[0]}" if examples else None
    refused = f"'{value}' is no known {base.__name__};"
    usable = [c for c in expected if not inspect.isabstract(c) and not c.__name__.startswith("_")]
    if close := _alias(value, {c.__name__ for c in usable}):
        return f"{refused} did you mean {close}?"
    if close := _similar_name(value, [c.__name__ for c in usable]):
        return f"{refused} did you mean '{close}'?"
    ends = sorted({c.__name__ for c in usable if not any(_builds_on(d, c) for d in usable)})
    own = "a class of your own goes with its module, as in my_module.MyClass"
    return f"{refused} known are {', '.join(ends)}; {own}" if len(ends) <= _AT_MOST else f"{refused} {own}"


def shorten(message: str) -> str:
    """The line that says what is wrong, with the class and key it is about, where there is no doubt which one it is.

    A parser that was offered a union of types reports on each of them, and prints the value it was given.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    telling = [i for i, line in enumerate(lines) if re.search(_SAID, line)][:1]
    for pattern in (_TELLING, r"Expected a dot import path|Unable to load config '"):
        telling = telling or [i for i, line in enumerate(lines) if re.search(pattern, line)]
    if not telling and "Errors:" in lines:  # what a class raised when it was made: the first type is the likeliest
        start = len(lines) - lines[::-1].index("Errors:")
        telling = [i for i in range(start, len(lines)) if not lines[i].startswith("Expected a <class")][:1]
    if len(telling) != 1:
        return message
    first = telling[0]
    owners = [m[1] for line in lines[:first] if (m := re.match(_OWNER, line))]
    near = lines[first - 1 : first] if owners else lines[:1]
    keys = [m[1] for line in near if (m := re.match(_KEY, line))]
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
    for known in _classes(typehint):
        if known.__module__.startswith("rl2lightning."):
            parameters = inspect.signature(known).parameters.values()
            yield from (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


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
        close = difflib.get_close_matches(part, sorted(siblings | {"class_path", "init_args"}), n=1)
        close = close or sorted((x for x in siblings if x.endswith(f"_{part}")), key=lambda x: (len(x), x))
        if close:  # or one that says more, as `per_token_beta` does where `beta` was asked for
            return ".".join([*parts[:depth], close[0]])
        break
    below = {path[-1] for path in paths if path[: len(parts) - 1] == parts[:-1]}
    close = difflib.get_close_matches(parts[-1], sorted(below), n=1, cutoff=0.8)
    return _named(parts[-1], known) or (_named(close[0], known) if close else None)


def _named(name: str, known: Iterable[str]) -> str | None:
    """The key of that name that is nearest to the top."""
    found = [key for key in known if key.endswith(f".{name}")]
    return min(found, key=lambda key: (key.count("."), len(key), key), default=None)


def _alias(name: str, known: Iterable[str]) -> str | None:
    """What goes by another name elsewhere, if there is such a thing here."""
    known = set(known)
    for text in _ALIASES.get(name, ()):
        if known.issuperset(re.findall(r"'(\w+)'", text)):
            return text
    return None


def _builds_on(derived: type, base: type) -> bool:
    """Whether a class of the same package is derived from `base`, which then is hardly a choice of its own."""
    same_package = derived.__module__.split(".")[0] == base.__module__.split(".")[0]
    return same_package and derived is not base and issubclass(derived, base)


def _similar_name(name: str, known: Iterable[str]) -> str | None:
    """The closest class name, in whatever case; never the very one that was refused."""
    by_lower = {x.lower(): x for x in known if x != name}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def _typehint(key: str, parser: argparse.ArgumentParser) -> Any:
    """The type of a key, also of one that a subcommand has."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = [_typehint(key, subparser) for subparser in action.choices.values()]
            return next((x for x in found if x is not None), None)
        if action.dest == key:
            return getattr(action, "_typehint", None)
    return None


def _classes(typehint: Any) -> list[type]:
    """The classes that a type allows and is known to be made of, each before those derived from it."""
    found = [c for part in get_args(typehint) for c in _classes(part)]
    if inspect.isclass(typehint) and get_origin(typehint) is None and typehint.__module__ != "builtins":
        found += [typehint, *(c for subclass in type.__subclasses__(typehint) for c in _classes(subclass))]
    return list(dict.fromkeys(found))


def _class_names(module: str | None) -> list[str]:
    """What a module offers; without one, our classes and Lightning's callbacks, which may go by their short names."""
    if module is not None:
        found = sys.modules[module]
        return [*dir(found), *(m.name for m in pkgutil.iter_modules(getattr(found, "__path__", ())))]
    loaded = [m for name, m in sys.modules.items() if name.startswith(("rl2lightning.", "lightning.pytorch.callbacks"))]
    return sorted({name for m in loaded for name, x in vars(m).items() if inspect.isclass(x)})
