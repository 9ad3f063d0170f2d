"""One optimizer step against plain PyTorch: one sequence at a time, full logits, no packing, no FSDP, no chunks.

Loss and gradient norm of the step are pinned besides: a change that moves both sides, as of the weights, shows there.
"""

from collections.abc import Callable
from pathlib import Path

import cases
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from plain import plain_logps
from transformers import AutoConfig, AutoModelForCausalLM

from rl2lightning import GRPO


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


def assert_pinned(outcome: dict, loss: float, norm: float) -> None:
    metrics = outcome["metrics"]
    assert float(metrics["train/loss"]) == pytest.approx(loss, rel=1e-3)
    assert float(metrics["train/grad_norm"]) == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_sft_token_level_is_the_mean_over_trained_tokens(tiny_model: str, max_tokens: int) -> None:
    seqs = cases.batch(cases.LENGTHS)
    loss, gradients = plain_gradient(tiny_model, lambda model: -torch.cat(plain_logps(model, seqs)).mean())
    outcome = cases.sft(tiny_model, max_tokens)
    assert_same(outcome, loss, gradients)
    assert_pinned(outcome, 5.158730, 4.365331)


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_sft_sequence_level_is_the_mean_of_the_sequences_means(tiny_model: str, max_tokens: int) -> None:
    seqs = cases.batch(cases.LENGTHS)

    def loss_of(model):
        return -torch.stack([x.mean() for x in plain_logps(model, seqs)]).mean()

    loss, gradients = plain_gradient(tiny_model, loss_of)
    outcome = cases.sft(tiny_model, max_tokens, "sequence")
    assert_same(outcome, loss, gradients)
    assert_pinned(outcome, 5.114957, 4.757364)


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


# ---- GRPO and its relatives, as they are shipped


def by_group(rewards: list[torch.Tensor]) -> torch.Tensor:
    """[4, 2] what the two samples of each group have earned."""
    return torch.stack([x.sum() for x in rewards]).view(-1, 2)


def group_relative(rewards: list[torch.Tensor], *, divide: bool = True) -> list[torch.Tensor]:
    earned = by_group(rewards)
    gap = earned - earned.mean(1, keepdim=True)
    advantages = (gap / (earned.std(1, keepdim=True) + 1e-6) if divide else gap).flatten()
    return [a.expand(len(x)) for a, x in zip(advantages, rewards, strict=True)]


def leave_one_out(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    advantages = (by_group(rewards) - by_group(rewards).flip(1)).flatten()
    return [a.expand(len(x)) for a, x in zip(advantages, rewards, strict=True)]


def whitened_to_come(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    to_come = torch.cat([x.flip(0).cumsum(0).flip(0) for x in rewards])
    return list(((to_come - to_come.mean()) / (to_come.std() + 1e-6)).split([len(x) for x in rewards]))


def clipped(logps: torch.Tensor, old: torch.Tensor, a: torch.Tensor, *, high: float = 0.2) -> torch.Tensor:
    ratio = (logps - old).exp()
    return torch.maximum(-ratio * a, -ratio.clamp(0.8, 1 + high) * a)


def clipped_per_sequence(logps: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The geometric mean of the ratios, in which each token has the same share."""
    ratio = (logps - old).mean().exp().expand(len(logps))
    return torch.maximum(-ratio * a, -ratio.clamp(1 - 3e-4, 1 + 4e-4) * a)


def capped(logps: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -(logps - old).exp().clamp(max=5).detach() * a * logps


def token_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(losses).mean()


def sequence_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.mean() for x in losses]).mean()


def constant(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(losses).sum() / (len(losses) * 20)  # the most tokens an answer may have


# advantages, policy loss, mean and where the KL is; loss and gradient norm
PRESETS: dict[str, tuple[Callable, Callable, Callable, str | None, float, float]] = {
    "grpo": (group_relative, clipped, sequence_mean, "loss", 0.3743812, 5.34883),
    "dr_grpo": (lambda r: group_relative(r, divide=False), clipped, constant, None, -0.001911738, 0.1024895),
    "dapo": (group_relative, lambda *x: clipped(*x, high=0.28), token_mean, None, 0.027137, 4.526601),
    "gspo": (group_relative, clipped_per_sequence, sequence_mean, None, 0.02210619, 2.55975),
    "cispo": (group_relative, capped, token_mean, None, 0.5863031, 3.475276),
    "rloo": (leave_one_out, lambda logps, old, a: -a * logps, sequence_mean, "reward", 0.1674414, 2.17641),
    "reinforce_pp": (whitened_to_come, clipped, token_mean, "reward", 0.05160926, 4.471622),
}
KL = 0.1


def shipped(name: str, model: str) -> GRPO:
    """The module of a config, made small."""
    config = yaml.safe_load((Path(__file__).parents[2] / f"configs/{name}.yaml").read_text())["model"]
    small = {"model": model, "max_tokens_per_device": 40, "samples_per_prompt": 2, "max_grad_norm": None}
    settings = config["init_args"] | small | {"sampling": {"max_tokens": 20}}
    settings |= {"kl": settings["kl"] | {"coef": KL}} if "kl" in settings else {}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(GRPO, "module")
    parsed = parser.parse_object({"module": {"class_path": config["class_path"], "init_args": settings}})
    return parser.instantiate_classes(parsed).module


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_the_step_of_its_paper(tiny_model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout is by weights of some steps ago, so that ratios are not 1 and clips say something."""
    advantages_of, policy_loss, mean, kl_place, pinned_loss, pinned_norm = PRESETS[name]
    seqs = cases.batch(cases.LENGTHS)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(cases.REFERENCE_SEED)
        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype=torch.float32)
        refs = plain_logps(reference, seqs)
        start = plain_logps(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), seqs)
    generator, scales = torch.Generator().manual_seed(4), [1.5, 0.3, 1e-4, 0.1] * 2
    olds = [x + scale * torch.randn(len(x), generator=generator) for x, scale in zip(start, scales, strict=True)]
    assert seqs.rewards is not None
    mine = [seqs.select([i]) for i in range(len(seqs))]
    rewards = [one.rewards[one.action_mask] for one in mine]  # type: ignore[index]
    if kl_place == "reward":
        rewards = [r - KL * (old - ref) for r, old, ref in zip(rewards, olds, refs, strict=True)]
    advantages = advantages_of(rewards)

    def loss_of(model):
        logps = plain_logps(model, seqs)
        losses = [policy_loss(*x) for x in zip(logps, olds, advantages, strict=True)]
        if kl_place == "loss":
            gaps = [x - ref for x, ref in zip(logps, refs, strict=True)]
            losses = [x + KL * ((-gap).exp() - 1 + gap) for x, gap in zip(losses, gaps, strict=True)]
        return mean(losses)

    loss, gradients = plain_gradient(tiny_model, loss_of)
    module = shipped(name, tiny_model)
    module.updates_per_rollout, module.mini_batches = 2, 1  # the first of two steps on all of it: old log-probs count
    known = {"policy": torch.zeros(seqs.num_tokens), "reference": torch.zeros(seqs.num_tokens)}
    known["policy"][seqs.action_mask], known["reference"][seqs.action_mask] = torch.cat(olds), torch.cat(refs)
    monkeypatch.setattr(module, "build_reference", lambda: reference)
    monkeypatch.setattr(module, "score", lambda model, _: known["reference" if model is reference else "policy"])
    outcome = cases.fit(module, seqs, cases.PromptBatch)
    assert_same(outcome, loss, gradients)
    if name != "rloo":
        assert 0 < float(outcome["metrics"]["train/clip_fraction"]) < 1
    assert_pinned(outcome, pinned_loss, pinned_norm)


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
