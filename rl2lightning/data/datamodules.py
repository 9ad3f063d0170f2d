"""The LightningDataModules: supervised conversations, prompts for rollouts, preference pairs."""

from __future__ import annotations

import json
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from rl2lightning.data.base import RowDataModule
from rl2lightning.data.chat import TrainOn
from rl2lightning.data.encoders import ChatEncoder, PreferenceEncoder, PromptEncoder, RowEncoder, UnpairedEncoder
from rl2lightning.data.loader import PromptLoader, StepLoader
from rl2lightning.data.sources import Rows, Source
from rl2lightning.types import ChatBatch, PromptBatch, Row


class AnswerDataModule(RowDataModule):
    """Rows that hold what is learned from: what data modules of conversations, pairs and labelled answers share.

    Yields `ChatBatch`, one per optimizer step. What is empty or cut off by `max_length`, so that nothing is left to
    train on, is dropped and counted in `ChatBatch.num_dropped`.

    Args:
        path: see `RowDataModule`, as for the arguments that are not listed here.
        batch_size: rows (conversations, pairs, answers) of one optimizer step, over all ranks.
        max_length: tokens after which a sequence, of a pair each half, is cut. What then has nothing left to train on
            is dropped and counted.
        apply_chat_template: False concatenates the contents, for base models.
        messages_key: column of the conversation; where answers have columns of their own, of the prompt, messages or a
            string.
        drop_last: leave out the incomplete last batch of a pass.
    """

    def __init__(
        self,
        path: str | Source | list[str | Source],
        batch_size: int = 32,
        max_length: int = 2048,
        *,
        apply_chat_template: bool = True,
        messages_key: str = "messages",
        drop_last: bool = True,
        **kwargs: Any,
    ) -> None:
        self.batch_size = batch_size
        super().__init__(path, **kwargs)
        _check_max_length(max_length)
        self.max_length, self.apply_chat_template = max_length, apply_chat_template
        self.messages_key, self.drop_last = messages_key, drop_last

    def encoder_settings(self) -> dict[str, Any]:
        """What every encoder of answers is given."""
        return {
            "tokenizer": self.load_tokenizer(),
            "max_length": self.max_length,
            "apply_chat_template": self.apply_chat_template,
            "messages_key": self.messages_key,
        }

    def train_dataloader(self) -> StepLoader[ChatBatch]:
        return self._training_steps(drop_last=self.drop_last)


class ChatDataModule(AnswerDataModule):
    """Conversations to imitate: rows `{"messages": [...]}` that end with an assistant turn, or prompts and responses.

    The rows of a `ChatBatch` hold the prompt (the conversation without its last turn) and the other columns, such as
    `answer`. A column `tools` (a list or its JSON) goes to the chat template.

    Args:
        train_on: `assistant` every assistant turn, `last` the final one only, `all` every token.
        prompt_key: column of the prompt, a string or messages, of rows that have no conversation but two texts.
        response_key: column of the response to it.
        **kwargs: see `AnswerDataModule` and `RowDataModule`.
    """

    def __init__(
        self,
        *args: Any,
        train_on: TrainOn = "assistant",
        prompt_key: str | None = None,
        response_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if (prompt_key is None) != (response_key is None):
            raise ValueError(f"set both data.prompt_key={prompt_key!r} and data.response_key={response_key!r}, or none")
        self.train_on: TrainOn = train_on
        self.prompt_key, self.response_key = prompt_key, response_key

    def make_encoder(self) -> ChatEncoder:
        return ChatEncoder(
            **self.encoder_settings(),
            train_on=self.train_on,
            prompt_key=self.prompt_key,
            response_key=self.response_key,
        )


class PreferenceDataModule(AnswerDataModule):
    """Pairs of a better and a worse answer: a prompt in `messages`, the answers in `chosen` and `rejected`.

    An answer is a string, the messages that follow the prompt, or the whole conversation; without a prompt column, or
    with `messages_key: null`, the turns in which two whole conversations agree are the prompt.

    The sequences of a `ChatBatch` are chosen, rejected, chosen, rejected …: the two of a pair share a group id,
    `labels` is True for chosen, `margins` is set where any row has one and NaN for the others. Pairs that are alike are
    dropped and counted, too.

    Args:
        messages_key: column of the prompt, messages or a string; None where it is what the two conversations share.
        chosen_key: column of the better answer.
        rejected_key: column of the worse answer.
        margin_key: column of how much better it is, a number; rows may lack it.
        **kwargs: see `AnswerDataModule` and `RowDataModule`.
    """

    def __init__(
        self,
        *args: Any,
        messages_key: str | None = "messages",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        margin_key: str = "margin",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.messages_key = messages_key
        self.chosen_key, self.rejected_key, self.margin_key = chosen_key, rejected_key, margin_key

    def make_encoder(self) -> PreferenceEncoder:
        return PreferenceEncoder(
            **self.encoder_settings(),
            chosen_key=self.chosen_key,
            rejected_key=self.rejected_key,
            margin_key=self.margin_key,
        )


class UnpairedDataModule(AnswerDataModule):
    """Answers that are desirable or not: a prompt in `messages`, one answer in `completion`, true or false in `label`.

    A label may be 1 or 0, too.
    An answer is a string, the messages that follow the prompt, or the whole conversation. A `ChatBatch` has one
    sequence for each, `labels` True for desirable. Pairs need not be taken apart: for KTO, PreferenceDataModule makes
    two such samples of each.

    Args:
        completion_key: column of the answer.
        label_key: column that says whether it is desirable.
        **kwargs: see `AnswerDataModule` and `RowDataModule`.
    """

    def __init__(self, *args: Any, completion_key: str = "completion", label_key: str = "label", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.completion_key, self.label_key = completion_key, label_key

    def make_encoder(self) -> UnpairedEncoder:
        return UnpairedEncoder(**self.encoder_settings(), completion_key=self.completion_key, label_key=self.label_key)

    def setup(self, stage: str) -> None:
        fresh = self.encoder is None
        super().setup(stage)
        labels = (self.train_split.rows[i][self.label_key] for i in self.train_split.indices)
        first = next(labels)
        if fresh and all(label == first for label in labels):  # mostly the first few rows say so
            raise ValueError(
                f"{self.label_key!r} is {json.dumps(first)} in all {len(self.train_split)} training rows of "
                f"{self.path!r}, and both kinds are needed; data.label_key names the column"
            )


class PromptDataModule(RowDataModule):
    """Prompts to roll out: rows `{"messages": [...], "answer": ...}`, messages a list or, for one user turn, a string.

    Yields `PromptBatch`, one per optimizer step, with prompts on the first step of each rollout; the module's
    `updates_per_rollout` says how many steps a rollout feeds. An epoch has a fixed number of optimizer steps, whatever
    refills take off the stream of prompts besides.

    Args:
        path: see `RowDataModule`, as for the arguments that are not listed here.
        prompts_per_rollout: prompts of one rollout, over all ranks.
        messages_key: column of the prompt.
        answer_key: column that becomes `row["answer"]`; None where there are no answers. All other columns stay.
        max_prompt_length: longer prompts, in tokens, are dropped in `setup` with a warning that counts them.
        apply_chat_template: False measures the bare contents, for base models.
    """

    batch_setting = "prompts_per_rollout"

    def __init__(
        self,
        path: str | Source | list[str | Source],
        prompts_per_rollout: int = 32,
        messages_key: str = "messages",
        answer_key: str | None = "answer",
        max_prompt_length: int | None = None,
        apply_chat_template: bool = True,
        **kwargs: Any,
    ) -> None:
        self.prompts_per_rollout = prompts_per_rollout
        super().__init__(path, **kwargs)
        if max_prompt_length is not None:
            _check_max_length(max_prompt_length, "max_prompt_length")
        self.messages_key, self.answer_key = messages_key, answer_key
        self.max_prompt_length, self.apply_chat_template = max_prompt_length, apply_chat_template

    def make_encoder(self) -> PromptEncoder:
        return PromptEncoder(
            self.load_tokenizer() if self.max_prompt_length is not None else None,
            max_prompt_length=self.max_prompt_length,
            apply_chat_template=self.apply_chat_template,
            messages_key=self.messages_key,
            answer_key=self.answer_key,
        )

    def draw(self, num_prompts: int) -> tuple[list[Row], list[int]]:
        """The next prompts of the global stream and their positions in it, the same on every rank.

        Position p is row p % n of pass p // n; each pass is shuffled anew and the stream never ends.
        """
        positions = list(range(self.position.prompt, self.position.prompt + num_prompts))
        self.position.prompt += num_prompts
        rows = self.train_split.rows
        return [self._encoder.normalise(rows[self.order[p]]) for p in positions], positions

    def train_dataloader(self) -> PromptLoader:
        num_prompts = self.order.rows_per_pass
        if num_prompts < self.prompts_per_rollout:
            raise ValueError(
                f"data.prompts_per_rollout={self.prompts_per_rollout} is larger than the {num_prompts} training prompts"
            )
        steps_per_rollout = self._trainer.lightning_module.updates_per_rollout
        return PromptLoader(
            self.draw,
            self.position,
            num_steps=num_prompts // self.prompts_per_rollout * steps_per_rollout,
            prompts_per_rollout=self.prompts_per_rollout,
            steps_per_rollout=steps_per_rollout,
            rank=self._rank,
            size=self._size,
        )

    def predict_dataloader(self) -> StepLoader[PromptBatch]:
        return self._held_out(self._encoder)

    def _check(self, rows: Rows, encoder: RowEncoder) -> set[int]:
        kept = super()._check(rows, encoder)
        if len(kept) < len(rows):
            rank_zero_warn(
                f"{len(rows) - len(kept)} of {len(rows)} prompts are longer than "
                f"data.max_prompt_length={self.max_prompt_length} tokens and left out"
            )
        return kept


def _check_max_length(value: int, name: str = "max_length") -> None:
    if value < 2:
        raise ValueError(f"data.{name}={value} must be at least 2, a token to see and one to predict")
