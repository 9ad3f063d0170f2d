"""What a misspelt configuration key was probably meant to be."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def suggest(message: str, parser: ArgumentParser) -> str:
    """A "did you mean" sentence for a parser's error message about an unknown key, or nothing.

    Candidates are the parser's own keys and the arguments of every class that the message names.
    """
    unknown = re.findall(r"(?:[Kk]ey|[Oo]ption|arguments?):?\s+['\"]?-*([\w.]+)", message)
    if not unknown or not re.search(r"not expected|not accepted|unrecognized|does not|Unknown", message, re.IGNORECASE):
        return ""
    candidates = set(_parser_keys(parser)) | set(_class_arguments(message))
    for key in unknown:
        leaf = key.rsplit(".", 1)[-1]
        leaves = {c.rsplit(".", 1)[-1] for c in candidates} - {leaf}
        if close := difflib.get_close_matches(leaf, sorted(leaves), n=1, cutoff=0.6):
            return f"\n  '{leaf}' is not known here: did you mean '{close[0]}'?"
    return ""


def _parser_keys(parser: ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield action.dest


def _class_arguments(message: str) -> Iterator[str]:
    for path in re.findall(r"[\w]+(?:\.[\w]+)+", message):
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        for cls in inspect.getmro(found) if inspect.isclass(found) else ():
            yield from inspect.signature(cls.__init__).parameters
