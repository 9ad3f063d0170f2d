"""An engine of plain transformers forwards: for tests, CPUs and small models, with nothing to install."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl2lightning.rollout.engine import EngineSpec, RolloutEngine, longest_sequence
from rl2lightning.rollout.rows import Request, Rows
from rl2lightning.rollout.stops import stop_watch
from rl2lightning.rollout.weight_stream import read_to_end
from rl2lightning.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

_NO_GRAMMARS = "sampling.structured needs an engine that follows grammars, rl2lightning.VLLMEngine; HFEngine does not"
_MAX_MASK_ELEMENTS = 1 << 26  # of a padded prefill's [prompts, length, length] mask


@dataclass
class _Batch:
    """Requests that are decoded together. `source` [R] is the row of the cache that each reads, None for its own."""

    rows: Rows
    cache: Cache
    source: Tensor | None = None


class HFEngine(RolloutEngine):
    """Own decode loop over a replica of the model, which is updated by copying.

    Requests join the running batch as soon as there is room and leave it when they finish. Samples of one prompt share
    its prefill. Sequences are padded on the left, so that all of them grow at the right.

    Args:
        max_num_seqs: most requests decoded at a time; their caches must fit on the device.
        max_model_len: most tokens of prompt and completion together; None: the model's own limit.
    """

    draws_by_position = True

    def __init__(self, max_num_seqs: int = 256, max_model_len: int | None = None) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"engine.init_args.max_num_seqs={max_num_seqs} must be at least 1")
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._model: PreTrainedModel | None = None
        self._asleep = False
        self._clear()

    def _clear(self) -> None:
        self._live: set[str] = set()
        self._waiting: list[Request] = []
        self._rejected: list[Completion] = []
        self._batch: _Batch | None = None

    # -- life cycle -----------------------------------------------------------------------------------------------

    def start(self, spec: EngineSpec) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if spec.structured:
            raise ValueError(_NO_GRAMMARS)
        config = AutoConfig.from_pretrained(spec.model_path)
        self._num_layers = _num_full_attention_layers(config)
        self._max_len = longest_sequence(config, spec, self.max_model_len)
        self.running_on = spec
        self._device = torch.device(spec.device)
        self._stop_token_ids = tuple(spec.stop_token_ids)
        # initialising draws random numbers, which the trainer's generators must not notice
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), self._device:
            model = AutoModelForCausalLM.from_config(config, dtype=spec.dtype, attn_implementation="sdpa")
        self._model = model.to(self._device).eval().requires_grad_(False)
        self.version = None
        self._asleep = False
        self._clear()

    def sleep(self) -> None:
        """Keeps the weights: a replica small enough for this engine may stay."""
        self._refuse_running("sleep")
        self._batch = None
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def shutdown(self) -> None:
        self._clear()
        self._model = self.running_on = None
        self.version = None

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with read_to_end(weights) as stream, torch.no_grad():
            self._copy(stream, version)

    def _copy(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        model = self._started()
        self._refuse_running("update_weights")
        self.version = None
        own = model.state_dict(keep_vars=True)  # tied weights under each of their names
        written: set[int] = set()
        for name, weight in weights:
            if name not in own:
                raise ValueError(f"pushed weight '{name}' is none of {type(model).__name__}'s; the models differ")
            target = own[name]
            if weight.shape != target.shape:
                shapes = f"{list(weight.shape)}, the engine's {list(target.shape)}"
                raise ValueError(f"pushed weight '{name}' has shape {shapes}; the models differ")
            if id(target) in written and not torch.equal(target, weight.to(target)):
                raise ValueError(f"'{name}' is tied in the engine's model, but another value came under its other name")
            target.copy_(weight)
            written.add(id(target))
        if missing := [name for name, target in own.items() if id(target) not in written]:
            raise ValueError(f"the push left out {len(missing)} weights, the first being '{missing[0]}'")
        self.version = version

    def _started(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the engine is not running; call start first")
        return self._model

    def _refuse_running(self, what: str) -> None:
        if self._live:
            raise RuntimeError(f"{what} with {len(self._live)} requests running; finish or abort them first")

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, seed: int, begun: int = 0
    ) -> None:
        self._started()
        if self.version is None:
            raise RuntimeError("the engine holds no complete set of weights; call update_weights before generating")
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake before generating")
        if request_id in self._live:
            raise ValueError(f"request '{request_id}' is running already; ids must differ")
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError(f"request '{request_id}' has an empty prompt; give at least one token")
        if sampling.structured is not None:
            raise ValueError(_NO_GRAMMARS)
        begin = prompt[len(prompt) - begun :]
        watch = stop_watch(sampling, self.running_on.tokenizer if self.running_on else None, begin)
        self._live.add(request_id)
        limit = min(self._max_len - len(prompt), sampling.max_tokens - begun)
        if limit < 1:
            self._rejected.append(Completion(request_id, prompt, [], [], "length", self.version))
            return
        stop = tuple(dict.fromkeys((*self._stop_token_ids, *sampling.stop_token_ids)))
        sampling = replace(sampling, min_tokens=max(0, sampling.min_tokens - begun))
        self._waiting.append(Request(request_id, prompt, sampling, seed, self.version, limit, stop, watch))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        done, self._rejected = self._rejected, []
        done += self._admit()
        if self._batch is not None:
            self._batch.rows.sample(self._decode(self._batch))
            done += self._batch.rows.finished()
            self._compact()
        self._live.difference_update(completion.request_id for completion in done)
        return done

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = self._live.intersection(request_ids)
        done = [completion for completion in self._rejected if completion.request_id in ids]
        self._rejected = [completion for completion in self._rejected if completion.request_id not in ids]
        done += [request.completion([], [], "abort") for request in self._waiting if request.request_id in ids]
        self._waiting = [request for request in self._waiting if request.request_id not in ids]
        if self._batch is not None:
            done += self._batch.rows.abort(ids)
            self._compact()
        self._live -= ids
        return done

    # -- the batch ------------------------------------------------------------------------------------------------

    def _decode(self, batch: _Batch) -> Tensor:
        """Logits [R, V] after the last token of each row."""
        rows, length = batch.rows, batch.cache.get_seq_length()
        # rows that have finished but are still here may run past the last position a model knows
        position_ids = (length - rows.pad[:, None]).clamp(max=self._max_len - 1)
        mask = None
        if rows.padded:
            mask = (torch.arange(length + 1, device=self._device) >= rows.pad[:, None])[:, None, None]
        return self._forward(rows.last[:, None], mask, position_ids, batch.cache)

    def _forward(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Cache) -> Tensor:
        out = self._started()(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _admit(self) -> list[Completion]:
        """Prefills what waits and fits, draws its first tokens, joins it to the batch; what that finished already."""
        running = self._batch.rows.num_alive if self._batch is not None else 0
        new = self._waiting[: self.max_num_seqs - running]
        if not new:
            return []
        self._waiting = self._waiting[len(new) :]
        prefilled = [self._prefill(requests) for requests in _chunks_by_length(new)]
        done = [completion for batch in prefilled for completion in batch.rows.finished()]
        self._join(([self._batch] if self._batch is not None else []) + prefilled)
        return done

    def _prefill(self, requests: list[Request]) -> _Batch:
        """Runs each different prompt once: the samples of one prompt share its cache until they join the batch."""
        from rl2lightning.rollout.kv_cache import new_cache

        prompts: dict[tuple[int, ...], int] = {}
        which = [prompts.setdefault(tuple(request.prompt_ids), len(prompts)) for request in requests]
        width = max(map(len, prompts))
        ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=self._device)
        pad = torch.tensor([width - len(p) for p in prompts], device=self._device)
        columns = torch.arange(width, device=self._device)
        mask = None
        if any(len(p) < width for p in prompts):
            causal, real = columns[:, None] >= columns, columns >= pad[:, None]
            # padding sees itself: a softmax over nothing is NaN in some kernels, and would spread through the cache
            mask = (causal & real[:, None] | torch.eye(width, dtype=torch.bool, device=self._device))[:, None]
        cache = new_cache(self._num_layers)
        logits = self._forward(ids, mask, (columns - pad[:, None]).clamp(min=0), cache)
        source = torch.tensor(which, device=self._device)
        rows = Rows.of(requests, pad[source], self._device)
        rows.sample(logits[source])
        return _Batch(rows, cache, source)

    def _compact(self) -> None:
        """Drops finished rows, but only once they are a quarter of the batch: it copies the cache."""
        if self._batch is not None and 4 * self._batch.rows.num_alive <= 3 * len(self._batch.rows.requests):
            self._join([self._batch])

    def _join(self, batches: list[_Batch]) -> None:
        """One batch of all rows still running: caches aligned at the right, columns that none of them uses cut off."""
        from rl2lightning.rollout.kv_cache import join_caches

        batches = [batch for batch in batches if batch.rows.num_alive]
        if not batches:
            self._batch = None
            return
        alive = [batch.rows.alive.nonzero()[:, 0] for batch in batches]
        lengths = [batch.cache.get_seq_length() for batch in batches]
        width = max(n - int(b.rows.pad[index].min()) for b, index, n in zip(batches, alive, lengths, strict=True))
        rows = [b.rows.select(index, pad_by=width - n) for b, index, n in zip(batches, alive, lengths, strict=True)]
        sources = [i if b.source is None else b.source[i] for b, i in zip(batches, alive, strict=True)]
        caches = [batch.cache for batch in batches]
        self._batch = _Batch(Rows.join(rows), join_caches(list(zip(caches, sources, strict=True)), width))


def _num_full_attention_layers(config: PretrainedConfig) -> int:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    layers: list[Any] = DynamicCache(config=config).layers
    if odd := {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}:
        raise ValueError(
            f"HFEngine handles full attention only, and a {config.model_type} model with this configuration caches in "
            f"{', '.join(sorted(odd))}"
        )
    return len(layers)


def _chunks_by_length(requests: list[Request]) -> list[list[Request]]:
    """Requests by length of prompt, cut where a chunk's padded prefill mask would grow too large."""
    chunks: list[list[Request]] = []
    for request in sorted(requests, key=lambda request: len(request.prompt_ids)):
        length = len(request.prompt_ids)
        if not chunks or (len(chunks[-1]) + 1) * length**2 > _MAX_MASK_ELEMENTS:
            chunks.append([])
        chunks[-1].append(request)
    return chunks
