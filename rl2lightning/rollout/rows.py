"""The running batch of `HFEngine` as tensors, one row a request, so that no step loops over requests in Python."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2lightning.rollout.sampling import draw, processed_logps, uniforms
from rl2lightning.rollout.stops import StopWatch
from rl2lightning.types import Completion, SamplingParams

_NO_STOP = -1  # fills up rows of stop_ids
_STOPPED, _AT_LIMIT, _NOT_FINITE = 1, 2, 3  # why a row ends; 0 goes on


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    version: int
    limit: int  # most tokens it may generate, by max_tokens and by max_model_len
    stop_token_ids: tuple[int, ...]
    watch: StopWatch | None = None

    def completion(
        self, token_ids: list[int], logps: list[float], reason: Literal["stop", "length", "abort"]
    ) -> Completion:
        stop = self.watch.found if self.watch is not None else None
        return Completion(self.request_id, self.prompt_ids, token_ids, logps, reason, self.version, stop)


@dataclass
class Rows:
    """R requests; rows stay after they finish, until a join leaves them out."""

    requests: list[Request]
    codes: list[int]  # [R], 0 for rows that go on, as of the last sample
    pad: Tensor  # [R] long, columns of padding at the left of the cache
    seed: Tensor  # [R] long
    prompt_length: Tensor  # [R] long
    limit: Tensor  # [R] long
    min_tokens: Tensor  # [R] long
    temperature: Tensor  # [R]
    top_p: Tensor  # [R]
    top_k: Tensor  # [R] long
    min_p: Tensor  # [R]
    stop_ids: Tensor  # [R, S] long
    alive: Tensor  # [R] bool
    count: Tensor  # [R] long, tokens generated
    last: Tensor  # [R] long
    token_ids: Tensor  # [R, C] long, the first `count` of each row are its completion
    logps: Tensor  # [R, C]
    num_alive: int
    longest: int = 0  # at least count.max()
    padded: bool = True  # False: no row has padding, so attention needs no mask

    def __post_init__(self) -> None:
        params = [request.sampling for request in self.requests]
        self.any_greedy = any(p.greedy for p in params)
        self.any_truncated = any(p.truncates_support and not p.greedy for p in params)
        self.any_minimum = any(p.min_tokens for p in params)
        self.any_watch = any(request.watch is not None for request in self.requests)

    @staticmethod
    def of(requests: list[Request], pad: Tensor, device: torch.device) -> Rows:
        """New rows that have generated nothing yet."""
        num_rows = len(requests)
        params = [request.sampling for request in requests]

        def longs(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        num_stops = max(len(request.stop_token_ids) for request in requests)
        stops = [r.stop_token_ids + (_NO_STOP,) * (num_stops - len(r.stop_token_ids)) for r in requests]
        return Rows(
            requests=requests,
            codes=[0] * num_rows,
            pad=pad,
            seed=longs([request.seed for request in requests]),
            prompt_length=longs([len(request.prompt_ids) for request in requests]),
            limit=longs([request.limit for request in requests]),
            min_tokens=longs([p.min_tokens for p in params]),
            temperature=floats([p.temperature for p in params]),
            # a greedy row takes the likeliest token of the whole distribution, and its log-prob
            top_p=floats([1.0 if p.greedy else p.top_p for p in params]),
            top_k=longs([0 if p.greedy else p.top_k for p in params]),
            min_p=floats([0.0 if p.greedy else p.min_p for p in params]),
            stop_ids=longs(stops).view(num_rows, num_stops),
            alive=torch.ones(num_rows, dtype=torch.bool, device=device),
            count=longs([0] * num_rows),
            last=longs([0] * num_rows),
            token_ids=torch.zeros(num_rows, 0, dtype=torch.long, device=device),
            logps=torch.zeros(num_rows, 0, device=device),
            num_alive=num_rows,
        )

    # -- one token a row ------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor) -> None:
        """Draws a token for every running row from its logits [R, V] and notes which rows that ends."""
        if self.any_minimum:
            logits = self._without_stops(logits)
        some = self.any_truncated
        logps = processed_logps(
            logits,
            self.temperature,
            top_p=self.top_p if some else None,
            top_k=self.top_k if some else None,
            min_p=self.min_p if some else None,
        )
        token = draw(logps, uniforms(self.seed, self.prompt_length + self.count))
        if self.any_greedy:
            token = torch.where(self.temperature == 0, logps.argmax(-1), token)
        self._record(token, logps.gather(-1, token[:, None])[:, 0])

    def _without_stops(self, logits: Tensor) -> Tensor:
        """Logits with the stop tokens ruled out in the rows that may not stop yet."""
        vocabulary = logits.shape[-1]
        ruled_out = (self.count < self.min_tokens)[:, None] & (self.stop_ids != _NO_STOP)
        column = torch.where(ruled_out, self.stop_ids, vocabulary)  # one column too many takes what is not to be set
        mask = torch.zeros(len(self.requests), vocabulary + 1, dtype=torch.bool, device=logits.device)
        return logits.masked_fill(mask.scatter_(1, column, True)[:, :vocabulary], -torch.inf)

    def _record(self, token: Tensor, logp: Tensor) -> None:
        if self.longest == self.token_ids.shape[1]:
            more = max(16, self.longest)
            self.token_ids, self.logps = F.pad(self.token_ids, (0, more)), F.pad(self.logps, (0, more))
        # rows that have finished write behind or over their completion, which was handed over when they did
        at = self.count.clamp(max=self.token_ids.shape[1] - 1)[:, None]
        self.token_ids.scatter_(1, at, token[:, None])
        self.logps.scatter_(1, at, logp[:, None])
        self.count = self.count + self.alive
        self.last = token
        self.longest += 1
        code = torch.where(self.count >= self.limit, _AT_LIMIT, 0)
        code = torch.where((token[:, None] == self.stop_ids).any(1), _STOPPED, code)
        if self.any_watch:
            code = torch.where(self._stop_texts(token), _STOPPED, code)
        code = torch.where(logp.isfinite(), code, _NOT_FINITE)
        code = torch.where(self.alive, code, 0)
        self.alive = self.alive & (code == 0)
        self.codes = code.tolist()  # the one synchronisation of a step

    def _stop_texts(self, token: Tensor) -> Tensor:
        """[R] bool, running rows whose text has come to one that ends it."""
        alive, tokens = self.alive.tolist(), token.tolist()
        found = [r.watch is not None and alive[i] and r.watch.push(tokens[i]) for i, r in enumerate(self.requests)]
        return torch.tensor(found, device=token.device)

    def finished(self) -> list[Completion]:
        """Completions of the rows that the last sample ended."""
        done = [i for i, code in enumerate(self.codes) if code]
        if not done:
            return []
        for i in done:
            if self.codes[i] == _NOT_FINITE:
                raise RuntimeError(
                    f"request '{self.requests[i].request_id}' met non-finite logits: "
                    f"the weights of version {self.requests[i].version} are broken or overflow the engine's dtype"
                )
        return self._take(done, ["stop" if self.codes[i] == _STOPPED else "length" for i in done])

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """Ends the running rows of these requests; their completions so far."""
        alive = self.alive.tolist()
        rows = [i for i, request in enumerate(self.requests) if alive[i] and request.request_id in request_ids]
        if not rows:
            return []
        self.alive = self.alive.index_fill(0, torch.tensor(rows, device=self.alive.device), False)
        return self._take(rows, ["abort"] * len(rows))

    def _take(self, rows: list[int], reasons: list[Literal["stop", "length", "abort"]]) -> list[Completion]:
        index = torch.tensor(rows, device=self.count.device)
        counts, ids, logps = self.count[index].tolist(), self.token_ids[index].tolist(), self.logps[index].tolist()
        self.num_alive -= len(rows)
        self.codes = [0] * len(self.codes)
        return [
            self.requests[row].completion(ids[i][: counts[i]], logps[i][: counts[i]], reasons[i])
            for i, row in enumerate(rows)
        ]

    # -- batches --------------------------------------------------------------------------------------------------

    def select(self, index: Tensor, *, pad_by: int) -> Rows:
        """The rows at `index`, with so many columns of padding more (fewer, if negative)."""
        tensors = {f.name: x[index] for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        tensors["pad"] = tensors["pad"] + pad_by
        at = index.tolist()
        requests, codes = [self.requests[i] for i in at], [self.codes[i] for i in at]
        return replace(self, requests=requests, codes=codes, num_alive=len(at), **tensors)

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        """All rows of the parts, one below the other."""
        tensors: dict[str, Tensor] = {}
        for f in fields(Rows):
            xs = [x for part in parts if isinstance(x := getattr(part, f.name), Tensor)]
            if xs and xs[0].dim() == 2:
                width = max(x.shape[1] for x in xs)
                fill = _NO_STOP if f.name == "stop_ids" else 0
                xs = [F.pad(x, (0, width - x.shape[1]), value=fill) for x in xs]
            if xs:
                tensors[f.name] = torch.cat(xs)
        return Rows(
            requests=[request for part in parts for request in part.requests],
            codes=[code for part in parts for code in part.codes],
            longest=max(part.longest for part in parts),
            padded=bool(tensors["pad"].any()),
            num_alive=sum(part.num_alive for part in parts),
            **tensors,
        )
