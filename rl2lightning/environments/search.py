"""A search tool that asks a retrieval service."""

from __future__ import annotations

from typing import Any

from rl2lightning.environments.tools import Tool
from rl2lightning.service import Service, ServiceError


class SearchTool(Tool):
    """The tool `search`: asks a retrieval service, and returns the passages it finds.

    The service takes `{"queries": [text], "topk": k, "return_scores": true}` and answers `{"result": [[{"document":
    {"contents": "title, line break, text"}, "score": x}, …]]}`, the protocol of Search-R1's retrieval server.
    `python -m rl2lightning.environments.search_server` is a small one.

    With Search-R1's tags instead of JSON: `format: {class_path: rl2lightning.environments.TagFormat, init_args: {tool:
    search, argument: query}}` of the ToolEnvironment.

    Args:
        url: of the service; the model cannot change it.
        top_k: passages that are returned.
        name: what the model calls it.
        timeout: seconds for one attempt.
        retries: attempts after the first one, `backoff` seconds later and twice as long each time.
        concurrency: requests at a time.
        token_env: environment variable with a token, sent as `Authorization: Bearer …`.
    """

    isolated = True

    def __init__(
        self,
        url: str,
        top_k: int = 3,
        name: str = "search",
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.5,
        concurrency: int = 32,
        token_env: str | None = None,
    ) -> None:
        if top_k < 1:
            raise ValueError(f"tools.init_args.top_k={top_k} must be at least 1")
        query = {"type": "string", "description": "What to look for."}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        schema = {"name": name, "description": "Searches a collection of texts.", "parameters": parameters}
        waits = sum(min(backoff * 2**i, 30.0) * 1.25 for i in range(retries))
        super().__init__(
            {"type": "function", "function": schema},
            timeout=(retries + 1) * timeout + waits + 60,  # beyond the service's own, which say more
        )
        self.top_k = top_k
        self._service = Service(
            url,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            concurrency=concurrency,
            token_env=token_env,
            setting="tools.init_args",
        )

    def __call__(self, arguments: dict[str, Any]) -> str:
        answer = self._service.post({"queries": [arguments["query"]], "topk": self.top_k, "return_scores": True})
        try:
            found = [_contents(hit) for hit in answer["result"][0]]
        except (KeyError, IndexError, TypeError) as error:
            raise ServiceError(f"{self._service.url} answered without a result: {answer!r:.300}") from error
        if not found:
            return "Nothing was found."
        return "\n".join(f"[{i}] {text}" for i, text in enumerate(found, start=1))


def _contents(hit: Any) -> str:
    document = hit.get("document", hit)  # without scores the documents come bare
    return document if isinstance(document, str) else document["contents"]
