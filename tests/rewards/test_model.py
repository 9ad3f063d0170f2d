"""A reward model in process: scores as transformers', from many threads, and as the same model behind a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl2lightning.cli import CLI
from rl2lightning.models.build import scalar_config
from rl2lightning.rewards import ClassifyReward, RewardModel, score
from rl2lightning.types import Trajectory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with random weights: the tiny model's transformer, and a head."""
    path = tmp_path_factory.mktemp("reward") / "model"
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rm = AutoModelForSequenceClassification.from_config(scalar_config(lm.config), dtype=torch.float32)
    rm.model.load_state_dict(lm.model.state_dict())
    rm.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(path)
    return str(path)


def trajectories() -> list[Trajectory]:
    conversations = [
        [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(10 * a + b)[: 1 + a % 3]}]
        for a in range(8)
        for b in range(3)
    ]
    conversations[3] += [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "no"}]
    return [Trajectory(row={}, group_id=i, messages=messages) for i, messages in enumerate(conversations)]


def plain_scores(directory: str, rendered: list[list[int]], model: Any = None) -> list[float]:
    if model is None:
        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in rendered]


def rendered(directory: str, wanted: list[Trajectory]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer.apply_chat_template(t.messages, return_dict=False) for t in wanted]


def test_scores_are_those_of_transformers_whoever_waits_with_whom(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trajectories()
    expected = plain_scores(directory, rendered(directory, wanted))
    assert torch.tensor(expected).std() > 0.1
    reward = RewardModel(directory, max_tokens=40)
    reward.prepare(CPU)
    passes, threads, together = [], set(), threading.Barrier(len(wanted))
    one_pass = reward._score

    def counted(sequences: list[list[int]]) -> list[float]:
        passes.append([len(ids) for ids in sequences])
        threads.add(threading.get_ident())
        return one_pass(sequences)

    def call(trajectory: Trajectory) -> float:
        together.wait()
        return reward(trajectory)

    monkeypatch.setattr(reward, "_score", counted)
    with ThreadPoolExecutor(len(wanted)) as pool:
        scores = list(pool.map(call, wanted))
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert sum(map(len, passes)) == len(wanted)  # each was scored once
    assert max(map(sum, passes)) <= 40
    assert len(passes) < len(wanted)  # and some of them together


def test_tokens_can_be_scored_as_they_are(directory: str) -> None:
    reward = RewardModel(directory, token_in=True)
    ids = [3, 20, 30, 5, 40, 50, 1]
    for cut in (7, 6):  # whole, and cut off before its end of turn: not closed, nor read at its last token but one
        found = reward(Trajectory(row={}, group_id=0, token_ids=ids[:cut]))
        assert found == pytest.approx(plain_scores(directory, [ids[:cut]])[0], abs=1e-5)
    with pytest.raises(ValueError, match="no tokens"):
        reward(Trajectory(row={}, group_id=0))


def test_tokens_that_the_model_numbers_otherwise_are_refused_as_they_are(directory: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    RewardModel(directory, token_in=True).check(tokenizer)
    other = (Path(directory) / "tokenizer.json").read_text().replace('"1":', '"swap":').replace('"2":', '"1":')
    (tmp_path / "tokenizer.json").write_text(other.replace('"swap":', '"2":'))
    (tmp_path / "tokenizer_config.json").write_text((Path(directory) / "tokenizer_config.json").read_text())
    changed = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has another number for '[12]': set token_in to false"):
        RewardModel(directory, token_in=True).check(changed)
    RewardModel(directory).check(changed)  # which reads the messages


def test_one_that_waits_too_long_for_a_pass_has_its_own(directory: str) -> None:
    reward, wanted = RewardModel(directory, max_tokens=1), trajectories()[:2]
    expected = plain_scores(directory, rendered(directory, wanted))
    assert [reward(t) for t in wanted] == pytest.approx(expected, abs=1e-5)


def test_an_offloaded_model_is_on_the_device_from_the_first_score_of_a_rollout_to_its_end(directory: str) -> None:
    elsewhere, wanted = torch.device("meta"), trajectories()[0]
    reward, stays = RewardModel(directory, offload=True), RewardModel(directory)
    reward.prepare(elsewhere)
    scorer = reward._scorer
    assert scorer is not None
    before = [p.clone() for p in scorer.parameters()]
    assert all(p.device == CPU for p in before)
    reward._wake()
    assert all(p.device == elsewhere for p in scorer.parameters())
    assert all(buffer.device == elsewhere for buffer in scorer.buffers())
    reward.sleep()
    assert all(torch.equal(p, x) for p, x in zip(scorer.parameters(), before, strict=True))
    reward._wake()  # a run that ends in the middle of a rollout
    for model in (reward, stays):
        model.prepare(CPU)
    assert not reward._awake
    assert {id(p) for _, _, p in reward._at_home} == {id(p) for p in reward._scorer.parameters()}
    for _ in range(2):
        assert reward(wanted) == stays(wanted) != 0
        for model in (reward, stays):
            model.sleep()


@pytest.fixture(scope="module")
def with_line_breaks(directory: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a template that writes something behind the end of a turn, as many do."""
    path = tmp_path_factory.mktemp("breaks") / "model"
    AutoModelForSequenceClassification.from_pretrained(directory).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>?")
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_reward_is_read_at_the_end_of_the_turn_or_of_the_template(with_line_breaks: str) -> None:
    wanted = trajectories()[:4]
    whole = rendered(with_line_breaks, wanted)
    ends = AutoTokenizer.from_pretrained(with_line_breaks).encode("<|end|>?", add_special_tokens=False)
    assert all(ids[-2:] == ends for ids in whole)
    for reward, expected in (
        (RewardModel(with_line_breaks), plain_scores(with_line_breaks, [ids[:-1] for ids in whole])),
        (RewardModel(with_line_breaks, whole_template=True), plain_scores(with_line_breaks, whole)),
    ):
        assert [reward(t) for t in wanted] == pytest.approx(expected, abs=1e-5)


def test_bare_contents_end_with_the_end_of_sequence(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [*tokenizer.encode("1+1=2", add_special_tokens=False), tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    found = RewardModel(directory, apply_chat_template=False)(Trajectory(row={}, group_id=0, messages=messages))
    assert found == pytest.approx(plain_scores(directory, [ids])[0], abs=1e-5)


# ---- in process or served


def served(directory: str) -> Callable[[Any, Any], tuple[int, Any]]:
    """A server that answers as vLLM's /classify does, of token ids and of messages."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # here and not in the server's threads: two that load at a time leave transformers' classes patched
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)

    def answer(payload: Any, headers: Any) -> tuple[int, Any]:
        given = payload.get("input") or tokenizer.apply_chat_template(payload["messages"], return_dict=False)
        assert all(isinstance(i, int) for i in given)
        return 200, {"object": "list", "data": [{"index": 0, "probs": plain_scores(directory, [given], model)}]}

    return answer


CONFIG = """
model:
  class_path: rl2lightning.GRPO
  init_args:
    model: {model}
    sampling: {{max_tokens: 4}}
    samples_per_prompt: 2
data:
  class_path: rl2lightning.PromptDataModule
  init_args: {{path: "prompts@{task}", prompts_per_rollout: 2, val_ratio: 0.0}}
trainer:
  max_steps: 1
  accelerator: cpu
  enable_progress_bar: false
  default_root_dir: {root}
  callbacks:
    - class_path: rl2lightning.RolloutCallback
      init_args:
        engine: {{class_path: rl2lightning.HFEngine}}
        rewards:
          - class_path: rl2lightning.rewards.RewardModel
            init_args: {{model: {directory}}}
          - class_path: rl2lightning.rewards.ClassifyReward
            init_args: {{url: "{url}", tokenizer: {directory}, name: served}}
          - class_path: rl2lightning.rewards.ClassifyReward
            init_args: {{url: "{url}", name: served_messages}}
"""


def test_grpo_gets_the_same_score_in_process_and_from_a_server(
    directory: str, tiny_model: str, task: str, tmp_path: Path, fake_service, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("sys.argv", ["rl2lightning"])
    prepare, prepared = RewardModel.prepare, []

    def noted(self: RewardModel, device: torch.device) -> None:
        prepared.append((device, threading.current_thread() is threading.main_thread()))
        prepare(self, device)

    monkeypatch.setattr(RewardModel, "prepare", noted)
    config = tmp_path / "config.yaml"
    service = fake_service(served(directory))
    config.write_text(CONFIG.format(model=tiny_model, task=task, root=tmp_path, directory=directory, url=service.url))
    cli = CLI(args=["fit", "--config", str(config)])
    metrics = cli.trainer.callback_metrics
    scores = [float(metrics[f"rollout/score/{name}"]) for name in ("reward_model", "served", "served_messages")]
    assert scores[0] != 0
    assert scores[1:] == pytest.approx([scores[0]] * 2, abs=1e-5)
    assert len(service.payloads) == 8  # four trajectories, twice
    assert prepared == [(CPU, True)]  # once, before any thread asked for a score
    reward = cli.trainer.callbacks[0].rewards[0]
    assert reward._scorer is None  # let go of at the end of the run


# ---- what is no reward model


def test_what_is_no_reward_model_is_refused(directory: str, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no reward model: it has no 'score\.weight'"):
        RewardModel(tiny_model).prepare(CPU)
    three = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=3, ignore_mismatched_sizes=True, problem_type=None
    )
    three.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(directory).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"3 labels\) has no head 'score\.weight' of one row"):
        RewardModel(str(tmp_path)).prepare(CPU)
    with pytest.raises(ValueError, match="'nowhere/at/all' is not a directory"):
        RewardModel("nowhere/at/all")
    with pytest.raises(ValueError, match="whole_template needs a template"):
        RewardModel(directory, apply_chat_template=False, whole_template=True)
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        RewardModel(directory, max_tokens=0)


def test_a_pass_that_fails_is_an_error_for_all_that_were_in_it(directory: str, monkeypatch) -> None:
    reward = RewardModel(directory)

    def no_memory(sequences: list[list[int]]) -> list[float]:
        raise MemoryError("out of it")

    monkeypatch.setattr(reward, "_score", no_memory)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda t: score(t, [reward], on_error="zero"), trajectories()))
    assert all(x.errors == {"reward_model/raised_RuntimeError": 1} for x in found)
    with pytest.raises(ValueError, match=r"reward model '.*': out of it"):
        score(trajectories()[0], [reward], on_error="error")
    silent = Trajectory(row={}, group_id=0, messages=[{"role": "user", "content": "?"}])
    with pytest.raises(ValueError, match="no assistant turn"):
        reward(silent)
    assert ClassifyReward("http://127.0.0.1:1/", tokenizer=directory)._tokens is not None
