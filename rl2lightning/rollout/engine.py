"""The interface of an inference engine: token ids in, token ids and log-probs out, weights pushed into it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rl2lightning.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order: run seed, prompt, sample, turn, …"""
    plain = tuple(part if isinstance(part, str) else int(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started on; everything else is a setting of the engine itself.

    Args:
        model_path: model directory; its config gives the architecture, its weights are not read.
        device: where this replica runs.
        dtype: type of the engine's copy of the weights.
        stop_token_ids: tokens that end a turn of this model (end of sequence, end of turn); they are part of the
            completion they end.
        max_model_len: most tokens of prompt and completion together; None is the model's own limit.
        tokenizer: reads completions where `SamplingParams.stop` names texts that end them.
        structured: whether requests will come with `SamplingParams.structured`, which an engine may have to prepare
            for; it needs the tokenizer, too.
        adapter_rank: rank of the adapters that `update_adapter` will bring, where the engine takes any.
    """

    model_path: str
    device: torch.device | str
    dtype: torch.dtype
    stop_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    structured: bool = False
    adapter_rank: int | None = None


def longest_sequence(config: PretrainedConfig, spec: EngineSpec, of_engine: int | None) -> int:
    """Most tokens of prompt and completion together: what the spec or the engine asks for, or else the model's limit.

    Raises:
        ValueError: more than the model has positions, or nobody names a length.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    wanted = spec.max_model_len or of_engine
    if wanted is None and limit is None:
        raise ValueError(f"'{spec.model_path}' names no longest sequence; set engine.init_args.max_model_len")
    if wanted is not None and limit is not None and wanted > limit:
        raise ValueError(f"max_model_len={wanted} exceeds the {limit} positions of '{spec.model_path}'")
    return wanted or limit  # type: ignore[return-value]


class RolloutEngine(ABC):
    """One per process, or per `tensor` processes. Constructed from settings alone; `start` builds it, on dummy weights.

    `version` is the optimizer step of the last complete push; None means that there was none yet, that one broke off
    half way, or that the weights were given up in sleep, and then generating is an error. `submit` and `step` never
    block on anything but the device.

    The order around a rollout is `update_weights` (also while asleep), `wake`, `submit`/`step` …, `sleep`.

    Where several processes share an engine, all of them call `start`, `update_weights`, `wake`, `sleep` and `shutdown`;
    requests are made by the one that `leads`, inside `together`.
    """

    version: int | None = None
    takes_adapters: bool = False  # a policy's adapters come by `update_adapter`, and its frozen weights once
    running_on: EngineSpec | None = None  # from `start` to `shutdown`
    tensor: int = 1  # consecutive processes that share an engine
    draws_by_position: bool = (
        False  # a request cut off and resubmitted with its tokens and seed goes on as it would have
    )

    @abstractmethod
    def start(self, spec: EngineSpec) -> None:
        """Builds the engine: awake, on dummy weights."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Requests submitted whose completion neither `step` nor `abort` has returned."""

    @abstractmethod
    def submit(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, seed: int, begun: int = 0
    ) -> None:
        """Queues a request.

        The last `begun` tokens of the prompt are the beginning of the completion, which was aborted and goes on, maybe
        under other weights: they count as tokens of it, and are read for texts that end it. What is returned are the
        tokens that come after them.

        The result depends on the weights, the arguments and nothing else: not on the requests it runs beside (up to
        the rounding of batched arithmetic), not on the order of submission. A prompt that leaves no room under
        `max_model_len` gives a completion without tokens and finish reason "length".

        Raises:
            RuntimeError: without weights, or asleep.
            ValueError: empty prompt, an id that is running already, or sampling that the engine cannot do.
        """

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advances all requests by a token or a few; returns those that finished, [] if idle."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Ends requests now: what they have so far, finish reason "abort". Unknown or finished ids are passed over."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights by a stream of (Hugging Face name, full tensor); tied weights may come under any name.

        The stream is read to its end even where that fails (`weight_stream.read_to_end`): other processes wait for it.

        Raises:
            ValueError: a name that the model lacks, a weight that did not come, a wrong shape. `version` stays None
                until a complete push.
            RuntimeError: requests are running: their cache belongs to the old weights, so abort or finish them first.
        """

    def update_adapter(
        self,
        base: Iterable[tuple[str, Tensor]],
        config: dict[str, Any],
        weights: Iterable[tuple[str, Tensor]],
        version: int,
    ) -> None:
        """Replaces the adapter beside the frozen weights, which are read from `base` where the engine has none yet.

        Args:
            base: stream of (Hugging Face name, full tensor).
            config: content of peft's `adapter_config.json`.
            weights: the adapter under the names in peft's files.
            version: as of `update_weights`, which such an engine need not be told.
        """
        raise NotImplementedError(f"{type(self).__name__} takes merged weights alone")

    @abstractmethod
    def sleep(self) -> None:
        """Gives device memory back to training; no request may be running."""

    @abstractmethod
    def wake(self) -> None:
        """Undoes `sleep`; nothing to do if awake."""

    @abstractmethod
    def shutdown(self) -> None:
        """Frees everything. A second call does nothing."""

    @property
    def leads(self) -> bool:
        """Whether this process submits the requests of its engine."""
        return True

    def follow(self) -> None:  # noqa: B027 - nobody follows an engine of one process
        """Repeats what the leader does with the engine, until it releases."""

    def release(self) -> None:  # noqa: B027
        """Lets those go who follow."""

    def together(self, fn: Callable[[], T]) -> T | None:
        """What fn returns on the process that leads; the others do what fn does with the engine, and get None."""
        if not self.leads:
            self.follow()
            return None
        try:
            return fn()
        finally:
            self.release()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion per prompt, in order; on an error nothing is left running."""
        if len(prompts) != len(seeds):
            raise ValueError(f"generate got {len(prompts)} prompts and {len(seeds)} seeds; give one seed per prompt")
        if self.unfinished:
            raise RuntimeError(f"generate needs an idle engine, {self.unfinished} requests are unfinished")
        ids = [f"generate/{i}" for i in range(len(prompts))]
        done: dict[str, Completion] = {}
        try:
            for request_id, prompt, seed in zip(ids, prompts, seeds, strict=True):
                self.submit(request_id, prompt, sampling, seed=seed)
            while self.unfinished:
                done.update((completion.request_id, completion) for completion in self.step())
        except BaseException:
            self.abort(ids)
            raise
        return [done[request_id] for request_id in ids]
