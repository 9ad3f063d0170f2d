"""JSON over HTTP to a service of one's own, with time-outs, retries and a bound on what runs at a time."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

_log = logging.getLogger(__name__)
_MAX_BYTES = 16 << 20  # a longer answer is not read
_SILENCE = 60.0  # seconds between two warnings: a server that limits its clients fails many of their requests


class ServiceError(RuntimeError):
    """A service gave no usable answer."""


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None  # only the address in the config is ever asked


class Service:
    """One address to post JSON to. Called from several threads.

    What may pass (no connection, a time-out, status 408, 429 or 5xx) is tried again, after `backoff` seconds and twice
    as long each time, up to `max_backoff`, a quarter more or less so that the callers do not come back all at once.
    Such failures are logged as warnings, at most one a minute. Proxies of the environment are not used, redirects not
    followed.

    Args:
        url: http or https.
        timeout: seconds for one attempt.
        retries: attempts after the first one.
        concurrency: requests at a time.
        token_env: environment variable that holds a token, sent as `Authorization: Bearer …`.
        setting: what an error names.

    Raises:
        ValueError: a setting that makes no sense, or `token_env` is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        backoff: float,
        max_backoff: float = 30.0,
        concurrency: int,
        token_env: str | None,
        setting: str,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{setting}.url='{url}' must be an http or https address")
        for name, value in (("timeout", timeout), ("concurrency", concurrency)):
            if not value > 0:
                raise ValueError(f"{setting}.{name}={value} must be positive")
        for name, value in (("retries", retries), ("backoff", backoff)):
            if not value >= 0:
                raise ValueError(f"{setting}.{name}={value} must not be negative")
        if token_env is not None and token_env not in os.environ:
            raise ValueError(f"{setting}.token_env='{token_env}': no such environment variable")
        self.url, self.timeout, self.retries = url, timeout, retries
        self.backoff, self.max_backoff, self.token_env = backoff, max_backoff, token_env
        self._slots = threading.BoundedSemaphore(concurrency)
        self._opener = build_opener(ProxyHandler({}), _NoRedirects())
        self._said_at = -math.inf  # that something failed, by the monotonic clock
        self._random = random.Random()  # of its own: the run's generators are not touched

    def post(self, payload: Any) -> Any:
        """The answer to a payload.

        Raises:
            ServiceError: refused, or no answer after all retries: says what came last.
        """
        body = json.dumps(payload).encode()
        for attempt in range(self.retries + 1):
            try:
                with self._slots:
                    return self._attempt(body)
            except _Passing as error:
                if attempt == self.retries:
                    tries = f"{attempt + 1} attempt{'s' if attempt else ''}"
                    raise ServiceError(f"{self.url} gave no answer in {tries}: {error}") from error
                self._say(error)
            pause = min(self.backoff * 2**attempt, self.max_backoff)
            time.sleep(pause * self._random.uniform(0.75, 1.25))
        raise AssertionError("the last attempt returns or raises")

    def _say(self, error: _Passing) -> None:
        if (now := time.monotonic()) - self._said_at > _SILENCE:
            self._said_at = now
            _log.warning("%s: %s; trying again, %d times at most", self.url, error, self.retries)

    def _attempt(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.token_env]}"
        request = Request(self.url, data=body, headers=headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                text = response.read(_MAX_BYTES + 1)
        except HTTPError as error:
            said = f"status {error.code}: {error.read(300).decode('utf-8', 'replace').strip()}"
            if error.code in (408, 429) or error.code >= 500:
                raise _Passing(said) from error
            raise ServiceError(f"{self.url} refused the request, {said}") from error
        except (URLError, OSError) as error:  # refused, reset, timed out, broken off
            raise _Passing(str(getattr(error, "reason", error)) or type(error).__name__) from error
        if len(text) > _MAX_BYTES:
            raise ServiceError(f"{self.url} answered with more than {_MAX_BYTES} bytes")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServiceError(f"{self.url} did not answer in JSON: {text[:200]!r}") from error


class _Passing(Exception):
    """What another attempt may mend."""
