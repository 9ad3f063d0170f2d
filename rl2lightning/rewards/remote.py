"""Rewards from a server: a reward model behind vLLM, or anything that answers JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rl2lightning.rewards.base import Reward, response_of
from rl2lightning.rewards.conversation import ConversationTokens
from rl2lightning.service import Service, ServiceError
from rl2lightning.types import Trajectory


class _ServedReward(Reward):
    """What the two kinds have in common: a request, and the number in its answer.

    A server that is down is waited for by the retries (with the defaults for about a minute); after that the reward
    has failed, and `on_reward_error` says what then. Failures are counted under the reward's name.
    """

    def __init__(
        self,
        url: str,
        name: str,
        weight: float,
        timeout: float,
        retries: int,
        backoff: float,
        concurrency: int,
        token_env: str | None,
    ) -> None:
        super().__init__(name=name, weight=weight)
        self._service = Service(
            url,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            concurrency=concurrency,
            token_env=token_env,
            setting="rewards.init_args",
        )

    @abstractmethod
    def _request(self, trajectory: Trajectory) -> Any: ...

    @abstractmethod
    def _value(self, answer: Any) -> Any:
        """The number in the answer; KeyError, IndexError or TypeError where it is not."""

    def __call__(self, trajectory: Trajectory) -> float:
        answer = self._service.post(self._request(trajectory))
        try:
            return self._value(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise ServiceError(f"{self._service.url} answered without a reward: {answer!r:.300}") from error


class RemoteReward(_ServedReward):
    """Posts `{"messages": […], "response": "…", …columns}` and takes the number that comes back, alone or as `key` of
    an object.

    Args:
        url: of the server.
        columns: of the row, to send along; one that a row lacks is sent as null.
        key: where the answer holds the reward.
        timeout: seconds for one attempt.
        retries: attempts after the first one, `backoff` seconds later and twice as long each time (at most 30 s).
        concurrency: requests at a time.
        token_env: environment variable with a token, sent as `Authorization: Bearer …`.
    """

    def __init__(
        self,
        url: str,
        columns: Sequence[str] = ("answer",),
        key: str = "reward",
        name: str = "remote",
        weight: float = 1.0,
        timeout: float = 30.0,
        retries: int = 6,
        backoff: float = 1.0,
        concurrency: int = 16,
        token_env: str | None = None,
    ) -> None:
        super().__init__(url, name, weight, timeout, retries, backoff, concurrency, token_env)
        if taken := {"messages", "response"} & set(columns):
            raise ValueError(f"rewards.init_args.columns: '{taken.pop()}' is sent anyway; name other columns")
        self.columns, self.key = tuple(columns), key

    def _request(self, trajectory: Trajectory) -> Any:
        columns = {name: trajectory.row.get(name) for name in self.columns}
        return {"messages": trajectory.messages, "response": response_of(trajectory), **columns}

    def _value(self, answer: Any) -> Any:
        return answer[self.key] if isinstance(answer, dict) else answer


class ClassifyReward(_ServedReward):
    """A reward model behind vLLM's `/classify`, or a server that answers like it.

    vLLM puts the scores through a sigmoid or softmax unless the model's config has `problem_type: regression`, or the
    server was started with `--pooler-config '{"use_activation": false}'`: a reward model wants neither.

    Args:
        url: ending in /classify.
        model: name under which the server knows the model; None: not sent.
        tokenizer: directory or hub name of the reward model's tokenizer: conversations are rendered by its chat
            template and sent as `input`, a list of token ids; None: sent as `messages`, which the server renders. It
            then reads the reward at the end of what the template writes; a model trained by RM wants a tokenizer here
            if its template writes anything behind the end of a turn, as Qwen's does.
        whole_template: with a tokenizer, send all that the template writes; False: up to the end-of-turn token, as RM
            trains it.
        label: position of the reward among the scores of a model with several.
        timeout, retries, backoff, concurrency, token_env: as for `RemoteReward`.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        tokenizer: str | None = None,
        whole_template: bool = False,
        label: int = 0,
        name: str = "reward_model",
        weight: float = 1.0,
        timeout: float = 60.0,
        retries: int = 6,
        backoff: float = 1.0,
        concurrency: int = 32,
        token_env: str | None = None,
    ) -> None:
        super().__init__(url, name, weight, timeout, retries, backoff, concurrency, token_env)
        self.model, self.label = model, label
        self._tokens = None if tokenizer is None else ConversationTokens(tokenizer, whole_template=whole_template)

    def _request(self, trajectory: Trajectory) -> Any:
        request: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self._tokens is not None:
            return request | {"input": self._tokens(trajectory)}
        return request | {"messages": [{"role": m["role"], "content": m["content"]} for m in trajectory.messages]}

    def _value(self, answer: Any) -> Any:
        return answer["data"][0]["probs"][self.label]
