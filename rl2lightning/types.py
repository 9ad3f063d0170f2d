"""The data that travels between the parts: messages, completions, trajectories and the one batch type, `Sequences`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Message = dict[str, Any]  # {"role": "user" | "assistant" | "system" | "tool", "content": str, ...}
Row = dict[str, Any]  # one row of a data set: "messages", "answer" and whatever other columns the source has


def refuse_misplaced(path: str) -> None:
    """A clear sentence where a directory belongs elsewhere than where a model is asked for."""
    directory = Path(path).expanduser()
    checkpoint = directory.parent if directory.name == "model" else directory  # there, files without the weights
    if (checkpoint / "meta.pt").is_file() and (checkpoint / "dcp").is_dir():
        output = f"{str(checkpoint).removesuffix('.ckpt')}-model"
        raise ValueError(
            f"'{path}' is a checkpoint, not a model directory: make one of it by `rl2lightning export --ckpt_path "
            f"{checkpoint} --output_dir {output}` and name that"
        )
    description = directory / "adapter_config.json"
    if description.is_file() and not (directory / "config.json").is_file():
        base = json.loads(description.read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"'{path}' is an adapter, not a model directory: name the model that it is for ('{base}') and, to train "
            "the adapter on, set model.init_args.lora.path to it; where nothing is trained, name both merged"
        )


def counted(number: int, one: str, several: str) -> str:
    """A number and what it counts, for messages: '1 process', '2 processes'."""
    return f"{number} {one if number == 1 else several}"


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


class RolloutError(RuntimeError):
    """Generating failed; every process of the run raises it at the same point."""


@dataclass(frozen=True)
class StructuredOutput:
    """A form that every turn has to keep to: exactly one of the three. The engine draws from the tokens that fit.

    Args:
        json_schema: a JSON schema, as a mapping or as text.
        regex: a regular expression for the whole turn.
        choice: the texts that a turn can be.
    """

    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if len(named) != 1:
            given = f"{' and '.join(named)} are" if named else "nothing is"
            raise ValueError(f"sampling.structured: {given} set; set one of json_schema, regex and choice")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. The module owns it: the engine samples by it, the loss scores at its temperature.

    Args:
        max_tokens: most tokens generated per turn.
        temperature: 0 is greedy; the log-probs of the loss are taken at this temperature.
        top_p: keep the smallest set of tokens with at least this probability.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest.
        min_tokens: no end of sequence before this many tokens.
        stop_token_ids: tokens that end a turn besides the model's own end-of-sequence tokens.
        stop: texts that end a turn; the token that completes one is the completion's last.
        structured: a JSON schema, regular expression or choice that every turn keeps to, on engines that can (vLLM).
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens={self.max_tokens} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature={self.temperature} must not be negative (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"sampling.min_p={self.min_p} must lie in [0, 1)")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k} must not be negative (0 keeps all)")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens={self.min_tokens} must lie between 0 and max_tokens={self.max_tokens}"
            )
        if not all(self.stop):
            raise ValueError("sampling.stop holds an empty text, which would end every turn at once; leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncating(self) -> list[str]:
        """The settings because of which some tokens can never be drawn, with their values."""
        excluding = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "min_tokens": self.min_tokens > 0,  # no stop token before that many
            "structured": self.structured is not None,
        }
        names = [name for name, excludes in excluding.items() if excludes]
        return [name if name == "structured" else f"{name}={getattr(self, name)}" for name in names]

    @property
    def truncates_support(self) -> bool:
        """Whether some tokens can never be drawn: then the full distribution is not the one sampled from."""
        return bool(self.truncating)


@dataclass
class Completion:
    """What an engine returns for one request."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]  # [L], the stop token included
    logps: list[float]  # [L], of the distribution sampled from
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int = 0  # optimizer step of the weights the request started under
    stop: str | None = None  # the text of `SamplingParams.stop` that ended it; None: a stop token, or something else

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"


@dataclass
class Trajectory:
    """One episode: prompt, turns of the policy and of the environment, as the tokens the engine saw and produced.

    Example: prompt 5 6, the policy answers 7 8, the environment adds 9, the policy answers 4:
    `token_ids=[5, 6, 7, 8, 9, 4]`, `action_mask=[F, F, T, T, F, T]`.
    """

    row: Row
    group_id: int  # position of the prompt in the rollout: samples of one prompt share it
    sample_id: int = 0
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # [L]
    action_mask: list[bool] = field(default_factory=list)  # [L], True on tokens the policy chose
    logps: list[float] = field(default_factory=list)  # [L], of the rollout policy, 0 off actions
    rewards: list[float] = field(default_factory=list)  # [L], on the last token of a turn, 0 elsewhere
    scores: dict[str, float] = field(default_factory=dict)  # raw named rewards, unweighted
    reward: float = 0.0  # what is trained on: the named rewards combined, plus the environment's own
    truncated: bool = False
    num_turns: int = 0
    weight_version: int = 0  # optimizer step of the weights that chose the first action
    weight_versions: list[int] = field(default_factory=list)  # [L], of those that chose each action, 0 off actions

    @property
    def num_actions(self) -> int:
        return sum(self.action_mask)

    def to(self, device: torch.device | str) -> Trajectory:
        """Itself: it holds no tensors. Spares Lightning a search through the lists of what `predict` returns."""
        return self


# [N] fields of Sequences that a step may or may not have
_TOKEN_FIELDS = (
    "rewards", "rollout_logps", "old_logps", "ref_logps", "values", "advantages", "returns", "weights",
    "weight_versions",
)  # fmt: skip
_SEQUENCE_FIELDS = (
    "group_ids", "trajectory_ids", "truncated", "labels", "margins", "weight_version", "sequence_weights",
    "ref_sums",
)  # fmt: skip


@dataclass
class Sequences:
    """B token sequences laid end to end, N tokens in all: packing is a slice, not a format.

    `x[i]` describes token i given the tokens before it in its own sequence (`values[i]`: the state token i was chosen
    in); it is 0 off `action_mask`. Example of two sequences, 3 + 2 tokens: `cu_seqlens = [0, 3, 5]`.
    """

    input_ids: Tensor  # [N] long
    action_mask: Tensor  # [N] bool, tokens that are trained on; never the first token of a sequence
    cu_seqlens: Tensor  # [B + 1] int32
    group_ids: Tensor  # [B] long, samples of one prompt (or the two halves of a pair) share one
    trajectory_ids: Tensor | None = None  # [B] long; None: each sequence is a trajectory of its own
    truncated: Tensor | None = None  # [B] bool
    labels: Tensor | None = None  # [B] bool, desirable or not (KTO), chosen or not (pairs)
    margins: Tensor | None = None  # [B] float, by how much the chosen half of a pair is better; NaN: not known
    ref_sums: Tensor | None = None  # [B] float, ref_logps summed over the actions of each sequence
    weight_version: Tensor | None = None  # [B] long, optimizer step of the weights that generated it (its first action)
    weight_versions: Tensor | None = None  # [N] long, of those that chose each action
    rewards: Tensor | None = None  # [N] float, and so on
    rollout_logps: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None  # each token's share of the step's loss, so that loss = sum(weights * x)
    sequence_weights: Tensor | None = None  # [B] float, each sequence's share, of a loss that has one value for each
    temperature: float = 1.0
    layout: Any = None  # models.packed.PackedLayout of a micro-batch that is ready to run

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """[B] long, tokens of each sequence."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_ids(self) -> Tensor:
        """[N] long, which sequence each token belongs to."""
        index = torch.arange(len(self), device=self.cu_seqlens.device)
        return index.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @property
    def position_ids(self) -> Tensor:
        """[N] long, position of each token within its sequence."""
        starts = self.cu_seqlens[:-1].long()
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - starts[self.sequence_ids]

    def sum_per_sequence(self, x: Tensor) -> Tensor:
        """Sum of x [N] over the actions of each sequence: [B]."""
        out = torch.zeros(len(self), dtype=x.dtype, device=x.device)
        return out.index_add(0, self.sequence_ids, x * self.action_mask)

    def token_fields(self) -> dict[str, Tensor]:
        """The optional [N] fields that are set, by name."""
        return {name: x for name in _TOKEN_FIELDS if (x := getattr(self, name)) is not None}

    def sequence_fields(self) -> dict[str, Tensor]:
        """The [B] fields that are set, by name."""
        return {name: x for name in _SEQUENCE_FIELDS if (x := getattr(self, name)) is not None}

    def replace(self, **changes: Any) -> Sequences:
        """A shallow copy with some fields changed."""
        return replace(self, **changes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Sequences:
        changes = {
            f.name: x.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(x := getattr(self, f.name), Tensor)
        }
        return self.replace(**changes)

    def pin_memory(self) -> Sequences:
        """A copy in page-locked memory, from which a GPU copies without making the host wait."""
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor) and not x.is_cuda}
        return self.replace(**{name: x.pin_memory() for name, x in tensors.items()})

    def select(self, indices: Sequence[int] | Tensor) -> Sequences:
        """The sequences at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.long, device=self.cu_seqlens.device)
        lengths = self.lengths[index]
        total = int(lengths.sum())
        cu_seqlens = torch.zeros(len(index) + 1, dtype=torch.int32, device=self.cu_seqlens.device)
        cu_seqlens[1:] = lengths.cumsum(0)
        # token t of the result is token t - (its new start) + (its old start) of this one
        offsets = self.cu_seqlens[:-1].long()[index] - cu_seqlens[:-1].long()
        tokens = torch.arange(total, device=index.device) + offsets.repeat_interleave(lengths, output_size=total)
        return self.replace(
            input_ids=self.input_ids[tokens],
            action_mask=self.action_mask[tokens],
            cu_seqlens=cu_seqlens,
            layout=None,
            **{name: x[tokens] for name, x in self.token_fields().items()},
            **{name: x[index] for name, x in self.sequence_fields().items()},
        )

    @staticmethod
    def concat(parts: Iterable[Sequences]) -> Sequences:
        """All sequences of the parts, in order; they have the same optional fields."""
        parts = list(parts)
        if not parts:
            raise ValueError("Sequences.concat needs at least one part")
        first = parts[0]
        if any(part.temperature != first.temperature for part in parts):
            raise ValueError("sequences sampled at different temperatures cannot be concatenated")
        lengths = torch.cat([part.lengths for part in parts])
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=first.cu_seqlens.device)
        cu_seqlens[1:] = lengths.cumsum(0)
        optional: dict[str, Tensor | None] = {}
        for name in (*_TOKEN_FIELDS, *_SEQUENCE_FIELDS):
            values = [x for part in parts if (x := getattr(part, name)) is not None]
            if 0 < len(values) < len(parts):
                raise ValueError(f"some of the sequences have `{name}` and others lack it; give it to all or to none")
            optional[name] = torch.cat(values) if values else None
        return first.replace(
            input_ids=torch.cat([part.input_ids for part in parts]),
            action_mask=torch.cat([part.action_mask for part in parts]),
            cu_seqlens=cu_seqlens,
            layout=None,
            **optional,
        )

    @staticmethod
    def from_lists(
        token_ids: Sequence[Sequence[int]],
        action_masks: Sequence[Sequence[bool]],
        group_ids: Sequence[int] | None = None,
        **optional: Any,
    ) -> Sequences:
        """From one list of tokens and one mask per sequence; [N] fields as one list of floats per sequence."""
        lengths = torch.tensor([len(ids) for ids in token_ids], dtype=torch.int32)
        cu_seqlens = torch.zeros(len(token_ids) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)

        def flat(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
            return torch.tensor([x for row in rows for x in row], dtype=dtype)

        for name in _TOKEN_FIELDS:
            if name in optional and optional[name] is not None and not isinstance(optional[name], Tensor):
                optional[name] = flat(optional[name], torch.float32)
        return Sequences(
            input_ids=flat(token_ids, torch.long),
            action_mask=flat(action_masks, torch.bool),
            cu_seqlens=cu_seqlens,
            group_ids=torch.tensor(range(len(token_ids)) if group_ids is None else group_ids, dtype=torch.long),
            **optional,
        )

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory], *, temperature: float) -> Sequences:
        """One sequence per trajectory, with rewards and rollout log-probs."""
        versions = [v for t in trajectories for v in t.weight_versions or [t.weight_version] * len(t.token_ids)]
        return Sequences.from_lists(
            [t.token_ids for t in trajectories],
            [t.action_mask for t in trajectories],
            [t.group_id for t in trajectories],
            rewards=[t.rewards for t in trajectories],
            rollout_logps=[t.logps for t in trajectories],
            truncated=torch.tensor([t.truncated for t in trajectories], dtype=torch.bool),
            weight_version=torch.tensor([t.weight_version for t in trajectories], dtype=torch.long),
            weight_versions=torch.tensor(versions, dtype=torch.long),
            temperature=temperature,
        )

    @staticmethod
    def dummy(like: Sequences, num_sequences: int = 1) -> Sequences:
        """Short sequences without actions and the same fields: what a rank without work runs for the collectives."""
        n = 2 * num_sequences
        optional: dict[str, Any] = {name: torch.zeros(n, dtype=x.dtype) for name, x in like.token_fields().items()}
        optional |= {name: torch.zeros(num_sequences, dtype=x.dtype) for name, x in like.sequence_fields().items()}
        optional["group_ids"] = torch.full((num_sequences,), -1)
        return like.replace(
            input_ids=torch.zeros(n, dtype=torch.long),
            action_mask=torch.zeros(n, dtype=torch.bool),
            cu_seqlens=torch.arange(0, n + 1, 2, dtype=torch.int32),
            **optional,
        )


@dataclass
class ChatBatch:
    """This rank's share of one optimizer step of supervised data, and the rows it came from (validation samples)."""

    sequences: Sequences | None  # None where the rank has no sample
    rows: list[Row]
    num_dropped: int = 0  # samples whose trained part was cut off entirely
    trajectories: list[Trajectory] = field(default_factory=list)  # validation samples, by the RolloutCallback


@dataclass
class PromptBatch:
    """One optimizer step of a rollout algorithm; the prompts come with the first step of each rollout.

    `rollout`, `trajectories` and `rolled_out` are filled in by the RolloutCallback.
    """

    rows: list[Row]  # this rank's contiguous share of the rollout's prompts; empty past the first step
    indices: list[int]  # position of each row in the global stream of prompts, the same on any layout
    step_of_rollout: int = 0
    rollout: Sequences | None = None  # this rank's sequences
    trajectories: list[Trajectory] = field(default_factory=list)
    rolled_out: bool = False  # the rows were played; `rollout` is None all the same where every sample was dropped

    @property
    def first_of_rollout(self) -> bool:
        return self.step_of_rollout == 0
