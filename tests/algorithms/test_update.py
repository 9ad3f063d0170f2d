"""One optimizer step against plain PyTorch: one sequence at a time, full logits, no packing, no FSDP, no chunks."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl2lightning.types import Sequences

spec = importlib.util.spec_from_file_location("cases", Path(__file__).parents[1] / "distributed/cases.py")
assert spec is not None
assert spec.loader is not None
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


def plain_logps(model, seqs: Sequences) -> list[torch.Tensor]:
    """Log-probs of the actions of each sequence."""
    out = []
    for i in range(len(seqs)):
        one = seqs.select([i])
        logits = model(input_ids=one.input_ids[None]).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(1, one.input_ids[1:, None])[:, 0]
        out.append(logps[one.action_mask[1:]])
    return out


def plain_gradient(model_path: str, loss_of) -> tuple[float, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loss = loss_of(model)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def assert_same(outcome: dict, loss: float, gradients: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(float(outcome["metrics"]["train/loss"]), loss, rtol=1e-5, atol=1e-6)
    assert outcome["gradients"].keys() == gradients.keys()
    for name, g in gradients.items():
        assert float((outcome["gradients"][name] - g).abs().max() / g.abs().max()) < 1e-5, name


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_sft_token_level_is_the_mean_over_trained_tokens(tiny_model: str, max_tokens: int) -> None:
    seqs = cases.batch(cases.LENGTHS)
    loss, gradients = plain_gradient(tiny_model, lambda model: -torch.cat(plain_logps(model, seqs)).mean())
    assert_same(cases.sft(tiny_model, max_tokens), loss, gradients)


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_sft_sequence_level_is_the_mean_of_the_sequences_means(tiny_model: str, max_tokens: int) -> None:
    seqs = cases.batch(cases.LENGTHS)

    def loss_of(model):
        return -torch.stack([x.mean() for x in plain_logps(model, seqs)]).mean()

    loss, gradients = plain_gradient(tiny_model, loss_of)
    assert_same(cases.sft(tiny_model, max_tokens, "sequence"), loss, gradients)


@pytest.mark.parametrize(("level", "max_tokens"), [("token", 31), ("sequence", 64), ("constant", 1000)])
def test_grpo_on_policy_gradient(tiny_model: str, level: str, max_tokens: int) -> None:
    """The surrogate's gradient at ratio 1 is that of -A log pi; KL to an equal reference has value and gradient 0."""
    seqs = cases.batch(cases.LENGTHS)
    assert seqs.rewards is not None
    rewards = seqs.sum_per_sequence(seqs.rewards).view(-1, 2)  # groups of two neighbours
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()

    def loss_of(model):
        per_token = [-a * (x - x.detach()).exp() for a, x in zip(advantages, plain_logps(model, seqs), strict=True)]
        if level == "token":
            return torch.cat(per_token).mean()
        if level == "sequence":
            return torch.stack([x.mean() for x in per_token]).mean()
        return torch.cat(per_token).sum() / (len(seqs) * 20)

    loss, gradients = plain_gradient(tiny_model, loss_of)
    outcome = cases.grpo(tiny_model, max_tokens, level)
    assert_same(outcome, loss, gradients)
    assert float(outcome["metrics"]["train/ratio"]) == 1.0  # one forward pass served as old and new policy
    assert float(outcome["metrics"]["train/kl"]) == pytest.approx(0.0, abs=1e-6)


def test_a_step_without_actions_counts_and_changes_nothing(tiny_model: str) -> None:
    seqs = cases.batch([8, 6])
    module = cases.SFT(tiny_model, optimizer=cases.OPTIMIZER, max_tokens_per_device=64)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    steps = []

    class Count(cases.Record):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.gradients = {}

        def on_train_end(self, trainer, pl_module):
            steps.append(trainer.global_step)
            self.metrics, self.weights = {}, {n: w.clone() for n, w in pl_module.policy_weights()}
            for name, p in before.named_parameters():
                torch.testing.assert_close(self.weights[name], p.detach(), rtol=0, atol=0)

    cases.Record, record = Count, cases.Record
    try:
        cases.fit(module, seqs.replace(action_mask=torch.zeros_like(seqs.action_mask)), cases.ChatBatch, steps=2)
    finally:
        cases.Record = record
    assert steps == [2]


def test_samples_without_advantage_cost_no_pass_and_change_nothing(tiny_model: str) -> None:
    class Everything(cases.GRPO):
        """The same loss under another name, for which nothing may be left out."""

        def loss(self, seqs):
            return super().loss(seqs)

    seqs = cases.batch(cases.LENGTHS)
    assert seqs.rewards is not None
    last = (seqs.cu_seqlens[1:] - 1).long()
    rewards = seqs.rewards.clone()
    rewards[last[:4]] = 0.1  # the first two of four groups are flat
    outcomes, num_tokens = [], []
    for kind in (cases.GRPO, Everything):
        module = kind(tiny_model, optimizer=cases.OPTIMIZER, max_grad_norm=None, samples_per_prompt=2)
        outcomes.append(cases.fit(module, seqs.replace(rewards=rewards), cases.PromptBatch))
        num_tokens.append(module.num_tokens_in_step)
    assert num_tokens == [sum(cases.LENGTHS[4:]), sum(cases.LENGTHS)]
    assert_same(outcomes[0], float(outcomes[1]["metrics"]["train/loss"]), outcomes[1]["gradients"])
