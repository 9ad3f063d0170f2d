"""The data modules under a real Trainer and on a real command line."""

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from rl2lightning.data import ChatDataModule, PromptDataModule, Source

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's pytree helpers, on torch 2.13
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

PROMPTS = "def train():\n    return [{'messages': f'say {i}', 'answer': str(i)} for i in range(10)]\n"
CHATS = PROMPTS.replace(
    "'messages': f'say {i}'",
    "'messages': [{'role': 'user', 'content': f'say {i}'}, {'role': 'assistant', 'content': str(i)}]",
)


class OneRank(SingleDeviceStrategy):
    data_rank, data_size = 0, 1


class Recorder(L.LightningModule):
    """Takes one counted step a batch, writes down what it was given, and draws a refill on every first step."""

    def __init__(self, tokenizer_path, updates_per_rollout=2):
        super().__init__()
        self.automatic_optimization = False
        self.tokenizer_path, self.updates_per_rollout = tokenizer_path, updates_per_rollout
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated, self.noise = [], [], []

    def configure_optimizers(self):
        self.num_steps = self.trainer.estimated_stepping_batches  # builds the loader before the state is restored
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        if isinstance(self.trainer.datamodule, PromptDataModule):
            drawn = self.trainer.datamodule.draw(1)[1] if batch.first_of_rollout else []
            self.seen.append((batch.step_of_rollout, batch.indices, drawn, [row["answer"] for row in batch.rows]))
        else:
            self.seen.append(batch.sequences.input_ids.tolist())
        self.optimizers().step()

    def validation_step(self, batch, batch_idx):
        self.validated.append([row["answer"] for row in batch.rows])

    def predict_step(self, batch, batch_idx):
        return batch.indices


def fit(data, model, directory, *, max_epochs=2, ckpt_path=None, **settings):
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=OneRank(device=torch.device("cpu")),
        max_epochs=max_epochs,
        callbacks=[ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def make_prompts(tmp_path):
    (tmp_path / "prompts.py").write_text(PROMPTS)
    return PromptDataModule(str(tmp_path / "prompts.py"), prompts_per_rollout=3, val_ratio=0.2, val_batch_size=2)


def make_chats(tmp_path):
    (tmp_path / "chats.py").write_text(CHATS)
    return ChatDataModule(str(tmp_path / "chats.py"), batch_size=2, val_ratio=0.2, num_workers=0)


@pytest.mark.parametrize("make_data", [make_prompts, make_chats])
def test_a_fit_resumed_at_any_step_sees_the_data_the_uninterrupted_one_saw(tmp_path, tokenizer_path, make_data):
    whole = Recorder(tokenizer_path)
    trainer = fit(make_data(tmp_path), whole, tmp_path / "whole")
    # 8 training rows: 2 rollouts of 3 prompts and 2 steps each, or 4 batches of 2, in each of 2 epochs
    assert trainer.global_step == len(whole.seen) == whole.num_steps == 8
    assert len(whole.validated) == 3  # one batch in the sanity check and after each epoch
    for step in (1, 3, 4, 6):
        resumed = Recorder(tokenizer_path)
        checkpoint = tmp_path / "whole" / f"step={step}.ckpt"
        trainer = fit(make_data(tmp_path), resumed, tmp_path / f"resumed{step}", ckpt_path=checkpoint)
        assert resumed.seen == whole.seen[step:]
        assert trainer.global_step == 8


def test_a_fit_that_goes_on_with_fewer_rows_says_so(tmp_path, tokenizer_path):
    fit(make_chats(tmp_path), Recorder(tokenizer_path), tmp_path / "whole", max_epochs=1)
    (tmp_path / "chats.py").write_text(CHATS.replace("range(10)", "range(5)"))
    data = ChatDataModule(str(tmp_path / "chats.py"), batch_size=2, val_ratio=0.2)
    with pytest.warns(UserWarning, match="data.path=.* gives 4 training rows in a pass, where the checkpoint had 8"):
        fit(data, Recorder(tokenizer_path), tmp_path / "resumed", ckpt_path=tmp_path / "whole" / "step=1.ckpt")


def test_epochs_cut_short_do_not_repeat_rows(tmp_path, tokenizer_path):
    model = Recorder(tokenizer_path)
    fit(make_chats(tmp_path), model, tmp_path / "checkpoints", limit_train_batches=2, limit_val_batches=0)
    whole = Recorder(tokenizer_path)
    fit(make_chats(tmp_path), whole, tmp_path / "whole", max_epochs=1)
    assert model.seen == whole.seen


def test_the_same_data_module_starts_over_in_a_new_fit_and_predicts_its_held_out_rows(tmp_path, tokenizer_path):
    data, first, second = make_prompts(tmp_path), Recorder(tokenizer_path), Recorder(tokenizer_path)
    fit(data, first, tmp_path / "first")
    trainer = fit(data, second, tmp_path / "second")
    assert first.seen == second.seen
    assert trainer.predict(second, datamodule=data) == [[0, 1]]


def test_the_constructor_is_the_schema_of_the_command_line():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    config = parser.parse_args(
        [
            "--data=rl2lightning.data.ChatDataModule",
            '--data.path=[{"path": "a.jsonl", "weight": 0.5}, "test@b.jsonl"]',
            "--data.train_on=last",
            "--data.val_ratio=0.1",
        ]
    )
    data = parser.instantiate(config).data
    assert data.path == [Source("a.jsonl", 0.5), "test@b.jsonl"]
    assert (data.train_on, data.val_ratio, data.batch_size) == ("last", 0.1, 32)
    pairs = ["--data=rl2lightning.data.PreferenceDataModule", "--data.path=a.jsonl"]
    for given, key in (("messages", "messages"), ("prompt", "prompt"), ("null", None)):
        config = parser.parse_args([*pairs, f"--data.messages_key={given}"])
        assert parser.instantiate(config).data.messages_key == key
    assert parser.instantiate(parser.parse_args(pairs)).data.messages_key == "messages"
    config = parser.parse_args(["--data=rl2lightning.data.PromptDataModule", "--data.path=a.jsonl"])
    assert parser.instantiate(config).data.path == "a.jsonl"
