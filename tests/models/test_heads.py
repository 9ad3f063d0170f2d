"""Scalar models against transformers' sequence classification, one sequence at a time."""

import copy
import json
from pathlib import Path

import lightning as L
import pytest
import torch
from quiet import quiet_trainer
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rl2lightning.models.build import (
    build_scalar_lm,
    full_weights,
    init_head,
    init_weights,
    load_config,
    load_weights,
    materialize,
    save_pretrained,
)
from rl2lightning.models.heads import SCALAR_HEAD, ScalarModel
from rl2lightning.models.packed import pack
from rl2lightning.types import Sequences

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the loader's, without a strategy
LENGTHS = [5, 2, 9, 6]


def sequences() -> Sequences:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(6, 100, (n,), generator=g).tolist() for n in LENGTHS]
    masks = [[False] * (n - n // 2) + [True] * (n // 2) for n in LENGTHS]
    return pack(Sequences.from_lists(ids, masks), CPU, torch.float32)


def scalar_model(directory: str, dtype: torch.dtype = torch.float32) -> ScalarModel:
    """From a directory, with a head drawn with seed 3 where it has none."""
    lm = build_scalar_lm(load_config(directory), dtype)
    materialize(lm, CPU)
    if load_weights(lm, directory, optional={SCALAR_HEAD}, superfluous={"lm_head.weight"}):
        init_head(lm, 3)
    return ScalarModel(lm)


@pytest.fixture(scope="module")
def saved(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A scalar model as it is exported."""
    directory = str(tmp_path_factory.mktemp("scalar"))
    model = scalar_model(tiny_model)
    save_pretrained(load_config(tiny_model), dict(full_weights(model.lm)), directory)
    return directory


def plain(directory: str, seqs: Sequences) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """transformers' rewards [B], and the head at every position of each sequence."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    rewards, values = [], []
    with torch.no_grad():
        for i in range(len(seqs)):
            ids = seqs.replace(layout=None).select([i]).input_ids[None]
            rewards.append(model(input_ids=ids).logits[0, 0])
            values.append(model.score(model.model(input_ids=ids).last_hidden_state)[0, :, 0])
    return torch.stack(rewards), values


def test_rewards_are_those_of_transformers_at_the_last_tokens(saved: str) -> None:
    seqs = sequences()
    rewards, _ = plain(saved, seqs)
    assert rewards.std() > 0.01
    torch.testing.assert_close(scalar_model(saved)(seqs, at="last"), rewards)


def test_values_are_those_of_the_states_before_each_action(saved: str) -> None:
    seqs = sequences()
    _, positions = plain(saved, seqs)
    # value i stands at token i and is that of the tokens before it; the first token of a sequence is never an action
    expected = torch.cat([torch.cat([x.new_zeros(1), x[:-1]]) for x in positions]) * seqs.action_mask
    values = scalar_model(saved)(seqs, at="actions")
    torch.testing.assert_close(values, expected)
    assert not values[~seqs.action_mask].any()


def test_the_head_computes_in_float32_under_a_bfloat16_transformer(tiny_model: str) -> None:
    seqs = sequences()
    model = scalar_model(tiny_model, torch.bfloat16)
    seen = []
    model.lm.score.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rewards = model(seqs, at="last")
    assert rewards.dtype == torch.float32
    assert seen[0].dtype == torch.bfloat16
    exact = seen[0].double() @ model.lm.score.weight.double().T
    torch.testing.assert_close(rewards, exact[:, 0].float(), rtol=1e-6, atol=1e-7)


def test_an_export_is_a_regression_of_one_label_under_the_names_of_transformers(saved: str) -> None:
    config = json.loads((Path(saved) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["problem_type"] == "regression"
    assert len(config["id2label"]) == 1
    names = set(load_file(Path(saved) / "model.safetensors"))
    assert "score.weight" in names
    assert all(name.startswith("model.") for name in names - {"score.weight"})


def test_a_new_head_depends_on_the_seed_alone(tiny_model: str) -> None:
    model = scalar_model(tiny_model)
    drawn = model.lm.score.weight.detach().clone()
    torch.rand(3)
    again = scalar_model(tiny_model).lm.score.weight
    assert torch.equal(drawn, again)
    init_head(model.lm, 4)
    assert not torch.equal(drawn, model.lm.score.weight)
    assert 0.1 < float(drawn.std()) < 0.3  # the model's initializer_range is 0.2


def test_random_weights_are_those_of_transformers(tiny_model: str) -> None:
    config = load_config(tiny_model)
    lm = build_scalar_lm(config, torch.float32)
    materialize(lm, CPU)
    init_weights(lm, config, 7)
    one_label = copy.deepcopy(config)
    one_label.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(7)
        reference = dict(AutoModelForSequenceClassification.from_config(one_label).named_parameters())
    ours = dict(lm.named_parameters())
    assert ours.keys() == reference.keys()
    for name, p in reference.items():
        assert torch.equal(ours[name], p), name


def test_a_head_of_several_labels_is_no_scalar_head(tiny_model: str, tmp_path: Path) -> None:
    config = load_config(tiny_model)
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'score\.weight' has the shape \[3, 32\] .* and \[1, 32\]"):
        scalar_model(str(tmp_path))


def test_a_family_without_sequence_classification_is_refused() -> None:
    from transformers import MambaConfig

    with pytest.raises(ValueError, match="'mamba' models have no form for sequence classification"):
        build_scalar_lm(MambaConfig(), torch.float32)


class Rewards(L.LightningModule):
    def __init__(self, directory: str, **settings) -> None:
        super().__init__()
        self.directory, self.settings = directory, settings

    def configure_model(self) -> None:
        self.model = self.trainer.strategy.build_scalar_model(self.directory, **self.settings)
        self.stored = {p.dtype for p in self.model.parameters()}

        def look(head, args) -> None:
            self.head_runs_in = head.weight.dtype

        self.model.lm.score.register_forward_pre_hook(look)

    def test_dataloader(self):
        return [0]

    def test_step(self, batch, batch_idx) -> None:
        with torch.no_grad():
            self.rewards = self.model(sequences(), at="last")


@pytest.mark.parametrize(("ckpt_path", "trainable", "told"), [(None, True, 1), ("a", True, 0), ("a", False, 1)])
def test_a_new_head_is_told_of_only_where_no_checkpoint_replaces_it(
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog,
    ckpt_path: str | None,
    trainable,
    told: int,
) -> None:
    trainer = quiet_trainer(tmp_path)
    monkeypatch.setattr(type(trainer), "ckpt_path", ckpt_path)  # as it is while a run with --ckpt_path starts
    module = Rewards(tiny_model, random_init=False, trainable=trainable)
    monkeypatch.setattr(trainer._checkpoint_connector, "_restore_modules_and_callbacks", lambda *args: None)
    with caplog.at_level("INFO"):
        trainer.test(module, verbose=False)
    assert caplog.text.count("has no scalar head") == told


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
@pytest.mark.parametrize("trainable", [True, False])
def test_the_strategy_builds_one_from_either_kind_of_directory(
    tiny_model: str, saved: str, tmp_path, precision: str, dtype: torch.dtype, trainable: bool, caplog
) -> None:
    rewards = []
    for directory in (tiny_model, saved):
        caplog.clear()
        module = Rewards(directory, random_init=False, seed=3, trainable=trainable)
        with caplog.at_level("INFO"):
            quiet_trainer(tmp_path, precision=precision).test(module, verbose=False)
        assert ("has no scalar head: a new one is drawn with seed 3" in caplog.text) is (directory == tiny_model)
        rewards.append(module.rewards)
        assert module.stored == {torch.float32 if trainable else dtype}
        assert module.head_runs_in == (torch.float32 if trainable else dtype)  # no mixed precision rounds it
        assert all(p.requires_grad is trainable for p in module.model.parameters())
    reference, _ = plain(saved, sequences())
    torch.testing.assert_close(rewards[0], rewards[1], rtol=0, atol=0)  # the same seed drew the head of `saved`
    gap = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(rewards[1], reference, rtol=gap, atol=gap)
