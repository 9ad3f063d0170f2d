"""A reward model in the process of the trainer."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rl2lightning.rewards.base import Reward
from rl2lightning.rewards.conversation import ConversationTokens
from rl2lightning.types import Sequences, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl2lightning.models.heads import ScalarModel


@dataclass(eq=False)
class _Request:
    tokens: list[int]
    outcome: float | Exception | None = None  # None: it waits


class RewardModel(Reward):
    """The score of a reward model: a directory for sequence classification with one label, as `rl2lightning export`
    writes it of an RM checkpoint.

    Every process holds all of it, on the device that it trains on: 2 bytes a parameter in bfloat16, beside training and
    beside the engine, or with `offload` beside the engine alone. Trajectories that wait at the same time are scored in
    one packed pass. See `ClassifyReward` for a model behind a server.

    Args:
        model: directory or hub name.
        dtype: type of the weights and of the computation, but for the head; None: bfloat16 on a GPU, float32 otherwise.
        token_in: score the very tokens of the trajectory, by a reward model with the policy's tokenizer and template;
            False: the messages, rendered by the reward model's own. The two differ where a turn was cut off, which
            rendering closes.
        apply_chat_template: False concatenates the contents, for a reward model trained like that.
        whole_template: read the reward at the end of all that the template writes, as many published models want it;
            False: at the end-of-turn token, as RM trains it.
        max_tokens: most tokens of one pass; a longer trajectory has one for itself. 1 scores them one by one, so that a
            score does not depend in its last bits on what else was waiting.
        offload: keep the weights in host memory, once for each process, and on the device only from the
            first score of a rollout to its end.
    """

    def __init__(
        self,
        model: str,
        dtype: Literal["bfloat16", "float32"] | None = None,
        token_in: bool = False,
        apply_chat_template: bool = True,
        whole_template: bool = False,
        max_tokens: int = 16384,
        offload: bool = False,
        name: str = "reward_model",
        weight: float = 1.0,
    ) -> None:
        super().__init__(name=name, weight=weight)
        if max_tokens < 1:
            raise ValueError(f"rewards.init_args.max_tokens={max_tokens} must be at least 1")
        self.model, self.dtype, self.max_tokens, self.offload = model, dtype, max_tokens, offload
        self._tokens: ConversationTokens | None = None
        if not token_in:
            self._tokens = ConversationTokens(
                model, apply_chat_template=apply_chat_template, whole_template=whole_template
            )
        self._scorer: ScalarModel | None = None
        self._at_home: list[tuple[nn.Module, str, nn.Parameter]] = []  # of `offload`: the weights in host memory
        self._awake = False
        self._device = torch.device("cpu")
        self._waiting: deque[_Request] = deque()
        self._running = threading.Lock()

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from rl2lightning.models.build import unlike_token

        if self._tokens is None and (token := unlike_token(tokenizer, self.model)) is not None:
            raise ValueError(
                f"rewards.init_args.token_in=true scores the policy's tokens, and reward model '{self.model}' has "
                f"another number for {token!r}: set token_in to false, and it reads the messages"
            )

    def prepare(self, device: torch.device) -> None:
        from rl2lightning.models.serving import load_scalar_model

        dtype = self.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        host = torch.device("cpu")
        scorer = load_scalar_model(self.model, host if self.offload else device, getattr(torch, dtype))
        self._scorer, self._device = scorer, device
        self._at_home, self._awake = [], False
        if self.offload:
            for module in scorer.modules():
                for name, buffer in module.named_buffers(recurse=False):  # a few numbers, which may stay
                    setattr(module, name, buffer.to(device))
                for name, p in module.named_parameters(recurse=False):
                    self._at_home.append((module, name, p))

    def sleep(self) -> None:
        for module, name, p in self._at_home:  # the weights do not change, so there is nothing to be copied back
            setattr(module, name, p)
        self._awake = False

    def _wake(self) -> None:
        if not self._awake:
            for module, name, p in self._at_home:
                setattr(module, name, nn.Parameter(p.to(self._device), requires_grad=False))
            self._awake = True

    def release(self) -> None:
        self._scorer, self._at_home, self._awake = None, [], False

    def __call__(self, trajectory: Trajectory) -> float:
        tokens = trajectory.token_ids if self._tokens is None else self._tokens(trajectory)
        if not tokens:
            raise ValueError("the trajectory has no tokens that could be scored")
        request = _Request(list(tokens))
        self._waiting.append(request)
        while request.outcome is None:
            with self._running:  # one pass at a time; who holds it may score what others wait for, and they his
                if request.outcome is None:
                    self._score_waiting()
        if isinstance(request.outcome, Exception):
            raise RuntimeError(f"reward model '{self.model}': {request.outcome}") from request.outcome
        return request.outcome

    def _score_waiting(self) -> None:
        """Scores as many of the waiting as fit into a pass, oldest first."""
        batch = [self._waiting.popleft()]
        total = len(batch[0].tokens)
        while self._waiting and total + len(self._waiting[0].tokens) <= self.max_tokens:
            batch.append(self._waiting.popleft())
            total += len(batch[-1].tokens)
        try:
            outcomes: list[Any] = self._score([request.tokens for request in batch])
        except Exception as error:
            outcomes = [error] * len(batch)
        for request, outcome in zip(batch, outcomes, strict=True):
            request.outcome = outcome

    def _score(self, sequences: list[list[int]]) -> list[float]:
        if self._scorer is None:  # used by hand, without a run
            self.prepare(torch.device("cuda", 0) if torch.cuda.is_available() else self._device)
        scorer = self._scorer
        assert scorer is not None
        seqs = Sequences.from_lists(sequences, [[False] * len(ids) for ids in sequences])
        # the current device is one of each thread
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with on_device, torch.no_grad():
            self._wake()
            return scorer(scorer.pack(seqs, self._device, scorer.lm.dtype), at="last").tolist()
