"""The process in which `ProcessRunner` calls functions. A script of its own: what it imports is loaded by every worker,
so it stays clear of torch.

Reads a line of JSON a request, {"target", "arguments", "max_chars"}, and answers in a line {"text"} or {"cause",
"message"}; a request without arguments loads the function only. What a tool prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import sys
import threading
from typing import Any

ALLOWED_NAMES = (str, int, float, bool, list, tuple, dict, type(None))


def as_text(value: Any, max_chars: int) -> str:
    """A tool's result as the model reads it: text as it is, all else as JSON.

    Raises:
        TypeError: JSON has no form for it.
    """
    if not isinstance(value, ALLOWED_NAMES):
        raise TypeError(f"it returned {type(value).__name__}, which is neither text nor JSON")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > max_chars:
        text = f"{text[:max_chars]}… ({len(text) - max_chars} more characters)"
    return text.encode("utf-8", "replace").decode()  # lone surrogates have no tokens


def _answer(functions: dict[str, Any], request: dict[str, Any]) -> dict[str, str]:
    from rl2lightning.usercode import load_function

    target = request["target"]
    try:
        if target not in functions:
            functions[target] = load_function(target, setting="tools")
        if "arguments" not in request:
            return {"text": ""}
        value = functions[target](**request["arguments"])
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except Exception as error:
        return {"cause": "raised", "message": f"{type(error).__name__}: {error}"}
    try:
        return {"text": as_text(value, request["max_chars"])}
    except (TypeError, ValueError) as error:
        return {"cause": "garbage", "message": str(error)}


async def _awaited(value: Any) -> Any:
    return await value


def _read(requests: queue.SimpleQueue[dict[str, Any]], source: Any) -> None:
    for line in source:
        requests.put(json.loads(line))
    os._exit(0)  # the trainer is gone, whatever the tool is doing


def main() -> None:
    source, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = json.loads(source.readline())["path"]
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, source), daemon=True).start()
    functions: dict[str, Any] = {}
    while True:
        answers.write(json.dumps(_answer(functions, requests.get())) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
