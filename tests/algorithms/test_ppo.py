"""PPO: a step of both models against plain PyTorch, what a rollout becomes, when the policy rests, its checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace

import cases
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from quiet import quiet_trainer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2lightning import (
    PPO,
    CriticWarmup,
    FSDP2TPStrategy,
    OptimizerConfig,
    PromptDataModule,
    RolloutCallback,
    SamplingParams,
)
from rl2lightning.algorithms import ppo
from rl2lightning.algorithms.kl_limit import KLLimit
from rl2lightning.estimators import GAE, GroupRelative, MonteCarlo, VTrace
from rl2lightning.export import export
from rl2lightning.policy_losses import KLPenalty, MismatchCorrection, Reinforce
from rl2lightning.types import PromptBatch, Sequences

# ---- two steps on a rollout, one sequence at a time, with full logits and Hugging Face's own forward


class Plain:
    """PPO by the book: policy, reference and critic as transformers makes them, episodes as Python lists."""

    gamma, lam, kl_coef, value_clip, clip = 0.98, 0.9, 0.1, 0.05, 0.2

    def __init__(self, path: str, seqs: Sequences) -> None:
        self.seqs = seqs
        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = AutoConfig.from_pretrained(path)
        with torch.random.fork_rng():
            torch.manual_seed(cases.REFERENCE_SEED)
            self.reference = AutoModelForCausalLM.from_config(config)
        self.backbone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model
        generator = torch.Generator().manual_seed(cases.HEAD_SEED)
        draw = torch.randn(1, config.hidden_size, generator=generator)
        self.head = nn.Parameter(config.initializer_range * draw)
        self.rollout()

    def logps(self, model: nn.Module) -> list[torch.Tensor]:
        """Of the actions of each sequence."""
        out = []
        for i in range(len(self.seqs)):
            one = self.seqs.select([i])
            logps = model(input_ids=one.input_ids[None]).logits[0, :-1].log_softmax(-1)
            out.append(logps.gather(1, one.input_ids[1:, None])[:, 0][one.action_mask[1:]])
        return out

    def values(self) -> list[torch.Tensor]:
        """Of the states that the actions of each sequence were taken in."""
        out = []
        for i in range(len(self.seqs)):
            one = self.seqs.select([i])
            hidden = self.backbone(input_ids=one.input_ids[None]).last_hidden_state[0, :-1]
            out.append((hidden @ self.head[0])[one.action_mask[1:]])
        return out

    @torch.no_grad()
    def rollout(self) -> None:
        self.old, self.old_values = self.logps(self.policy), self.values()
        advantages, self.returns = [], []
        for i, (old, ref, values) in enumerate(zip(self.old, self.logps(self.reference), self.old_values, strict=True)):
            one = self.seqs.select([i])
            rewards = one.rewards[one.action_mask] - self.kl_coef * (old - ref)
            advantage, following, reversed_advantages = 0.0, 0.0, []
            for reward, value in zip(rewards.flip(0), values.flip(0), strict=True):
                advantage = reward + self.gamma * following - value + self.gamma * self.lam * advantage
                following = value
                reversed_advantages.append(advantage)
            advantages.append(torch.stack(reversed_advantages).flip(0))
            self.returns.append(advantages[-1] + values)
        joined = torch.cat(advantages)
        self.advantages = (joined - joined.mean()) / (joined.std() + 1e-6)
        residual = torch.cat(self.returns) - torch.cat(self.old_values)
        self.explained_variance = float(1 - residual.var() / torch.cat(self.returns).var())

    def step(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """What is logged, and the gradients by name."""
        log_ratio = torch.cat(self.logps(self.policy)) - torch.cat(self.old)
        ratio = log_ratio.exp()
        held = ratio.clamp(1 - self.clip, 1 + self.clip)
        loss = -torch.minimum(ratio * self.advantages, held * self.advantages).mean()
        values, old_values, returns = torch.cat(self.values()), torch.cat(self.old_values), torch.cat(self.returns)
        clipped = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        critic_loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
        policy, critic = dict(self.policy.named_parameters()), dict(self.backbone.named_parameters(prefix="model"))
        critic["score.weight"] = self.head
        gradients: dict[str, torch.Tensor] = {}
        norms = []
        for name, x, model in (("policy", loss, policy), ("critic", critic_loss, critic)):
            found = torch.autograd.grad(x, list(model.values()))
            gradients |= {f"{name}.{n}": g for n, g in zip(model, found, strict=True)}
            norms.append(float(torch.stack([g.norm() for g in found]).norm()))
        logged = {
            "loss": float(loss.detach()),
            "critic_loss": float(critic_loss.detach()),
            "grad_norm": norms[0],
            "critic_grad_norm": norms[1],
            "approx_kl": float((ratio - 1 - log_ratio).mean().detach()),  # k3 of KL(old || policy)
            "ratio": float(ratio.mean().detach()),
            "critic_clip_fraction": float(((values - old_values).abs() > self.value_clip).float().mean()),
            "explained_variance": self.explained_variance,
        }
        return logged, gradients

    def learn(self, gradients: dict[str, torch.Tensor]) -> None:
        """The first step of Adam: lr * g / (|g| + eps)."""
        models = {"policy": self.policy.named_parameters(), "critic": self.backbone.named_parameters(prefix="model")}
        named = {f"{name}.{n}": p for name, parameters in models.items() for n, p in parameters}
        named["critic.score.weight"] = self.head
        with torch.no_grad():
            for name, p in named.items():
                config = cases.POLICY_STEPS if name.startswith("policy") else cases.CRITIC_STEPS
                p -= config.lr * gradients[name] / (gradients[name].abs() + config.eps)


PINNED = [  # of the two steps; whitened advantages and ratios of 1 make the first loss 0
    {"loss": 0.0, "critic_loss": 1.037409, "grad_norm": 4.450083, "critic_grad_norm": 8.556921},
    {"loss": -0.1478125, "critic_loss": 0.9956534, "grad_norm": 0.8016216, "critic_grad_norm": 0.9810889},
]


@pytest.mark.parametrize("max_tokens", [31, 1000])
def test_two_steps_on_a_rollout_are_those_of_plain_pytorch(tiny_model: str, max_tokens: int) -> None:
    outcome = cases.ppo(tiny_model, max_tokens)
    plain = Plain(tiny_model, cases.turns(cases.LENGTHS))
    for step in (0, 1):
        logged, gradients = plain.step()
        ours = outcome["gradients_of_steps"][step]
        assert ours.keys() == gradients.keys()
        for name, g in gradients.items():
            assert float((ours[name] - g).abs().max() / g.abs().max()) < 1e-5, name
        for name, x in logged.items():
            assert outcome["steps"][step][f"train/{name}"] == pytest.approx(x, rel=1e-5, abs=2e-6), name
        assert {name: logged[name] for name in PINNED[step]} == pytest.approx(PINNED[step], rel=1e-4, abs=1e-5)
        if step == 0:
            assert logged["ratio"] == 1
            plain.learn(gradients)
    assert logged["approx_kl"] > 0.01  # the second step is about something
    assert 0 < logged["critic_clip_fraction"] < 1


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs=0 and mini_batches=1 must be at least 1"),
        ({"mini_batches": 0}, "epochs=1 and mini_batches=0 must be at least 1"),
        ({"advantage": GroupRelative()}, "GroupRelative has no use for a critic: set advantage to GAE, or use GRPO"),
        ({"advantage": MonteCarlo(use_values=False)}, "MonteCarlo has no use for a critic"),
        ({"value_clip": 0.0}, r"value_clip=0\.0 must be positive, or null"),
        ({"target_kl": 0.0}, r"target_kl=0\.0 must be positive, or null"),
        ({"samples_per_prompt": 0}, "samples_per_prompt=0"),
        ({"advantage": VTrace(), "mismatch": MismatchCorrection()}, "VTrace corrects the rollout mismatch already"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_out(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO("some/model", **settings)


def test_a_warm_up_needs_steps() -> None:
    with pytest.raises(ValueError, match="num_steps=0 of the critic's warm-up must be at least 1"):
        CriticWarmup(0)


# ---- a rollout, by hand

OLD = torch.tensor([0.0, -1.0, 0.0, -2.0, 0.0, -0.5])
REF = torch.tensor([0.0, -1.5, 0.0, -1.0, 0.0, -0.5])  # old - ref = 0.5, -1 and 0 on the actions
VALUES = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.0, 1.0])


def rollout() -> Sequences:
    """Two turns of one trajectory, p a e a with rewards 1 and 2, and another prompt's p a without one."""
    return Sequences.from_lists(
        [[5, 6, 9, 7], [5, 8]],
        [[False, True, False, True], [False, True]],
        [0, 1],
        rewards=[[0.0, 1.0, 0.0, 2.0], [0.0, 0.0]],
    )


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch):
    """A PPO whose models give the numbers above, without a trainer."""

    def make(**settings) -> PPO:
        module = PPO("some/model", **settings)
        module.policy, module.reference, module.critic = nn.Identity(), nn.Identity(), nn.Identity()
        known = {"policy": OLD, "reference": REF, "critic": VALUES}
        names = {id(getattr(module, name)): name for name in known}
        module.logged, module.scored = {}, []

        def score(model: nn.Module, seqs: Sequences) -> torch.Tensor:
            module.scored.append(names[id(model)])
            return known[names[id(model)]]

        monkeypatch.setattr(module, "score", score)
        monkeypatch.setattr(module, "log", lambda name, x, **kwargs: module.logged.update({name: float(x)}))
        module._trainer = SimpleNamespace(global_step=3)
        return module

    return make


def test_gae_goes_across_turns_and_the_kl_is_in_the_rewards(scored) -> None:
    module = scored(kl=KLPenalty(0.1, "k1", "reward"), advantage=GAE(gamma=0.5, lam=0.5, whiten=False))
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.rewards, torch.tensor([0.0, 0.95, 0.0, 2.1, 0.0, 0.0]))
    # the second turn: 2.1 - 0.25 = 1.85; the first: 0.95 + 0.5 * 0.25 - 0.5 = 0.575, and 0.25 * 1.85 of the second
    torch.testing.assert_close(seqs.advantages, torch.tensor([0.0, 0.575 + 0.4625, 0.0, 1.85, 0.0, -1.0]))
    torch.testing.assert_close(seqs.returns, torch.tensor([0.0, 1.5375, 0.0, 2.1, 0.0, 0.0]))
    assert module.logged["train/kl"] == pytest.approx(-0.5 / 3)


def test_the_critic_learns_raw_returns_and_the_policy_whitened_advantages(scored) -> None:
    module = scored(advantage=GAE())  # lam = gamma = 1: returns 3, 2 and 0 whatever the values
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.returns, torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0, 0.0]))
    actions = seqs.advantages[seqs.action_mask]
    assert float(actions.mean()) == pytest.approx(0, abs=1e-6)
    assert float(actions.std()) == pytest.approx(1, abs=1e-5)
    # residuals 2.5, 1.75, -1 with variance 6.79167 / 2; returns 3, 2, 0 with 7/3
    assert module.logged["train/explained_variance"] == pytest.approx(1 - (6.7916667 / 2) / (7 / 3))


def test_value_pre_training_regresses_on_monte_carlo_returns_unclipped(scored, monkeypatch) -> None:
    module = scored(advantage=GAE(gamma=0.5, lam=0.0), value_clip=0.1)
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.returns[1], torch.tensor(1.0 + 0.5 * 0.25))  # bootstrapped
    monkeypatch.setattr(nn.Identity, "forward", lambda self, seqs, at: VALUES + 0.5 * seqs.action_mask)
    _, logged = module.critic_loss(seqs)
    assert logged["clip_fraction"].tolist() == [0, 1, 0, 1, 0, 1]
    module = scored(advantage=GAE(gamma=0.5, lam=0.0), value_clip=0.1)
    module.critic_warmup = "monte_carlo"
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.returns, torch.tensor([0.0, 2.0, 0.0, 2.0, 0.0, 0.0]))
    monkeypatch.setattr(nn.Identity, "forward", lambda self, seqs, at: VALUES + 0.5 * seqs.action_mask)
    loss, logged = module.critic_loss(seqs)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 0.0, 1.25**2, 0.0, 1.5**2]) / 2)
    assert "clip_fraction" not in logged


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["critic"]),  # one on-policy update: the policy is run once, in the update
        ({"kl": KLPenalty(0.1)}, ["reference", "critic"]),
        ({"kl": KLPenalty(0.1, "k1", "reward")}, ["policy", "reference", "critic"]),
        ({"epochs": 2}, ["policy", "critic"]),
        ({"mini_batches": 2}, ["policy", "critic"]),
    ],
)
def test_a_rollout_is_scored_once_and_by_no_model_without_need(scored, settings: dict, expected: list[str]) -> None:
    module = scored(**settings)
    if not module.kl.enabled:
        module.reference = None
    module.learn_from(rollout())
    assert module.scored == expected


def test_an_epoch_uses_every_sequence_once_and_the_next_another_order(scored) -> None:
    seqs = Sequences.from_lists(
        [[1, i] for i in range(10, 17)], [[False, True]] * 7, rewards=[[0.0, float(i)] for i in range(7)]
    )
    runs = []
    for attempt in range(2):
        module = scored(epochs=3, mini_batches=2)
        module.score = lambda model, seqs: torch.zeros(seqs.num_tokens)
        module.reference = None
        module._trainer = SimpleNamespace(global_step=30, strategy=None)
        torch.manual_seed(attempt)  # which is nothing to the order
        orders, shares = [], []
        for step in range(module.updates_per_rollout):
            if step == 0:
                module.experience = module.learn_from(seqs)
            else:
                module.prepare(PromptBatch([], [], step_of_rollout=step))
            shares += module.share(module.experience, step).input_ids[1::2].tolist()
            if step % 2:
                orders.append(shares)
                shares = []
            module._trainer.global_step += 1
        runs.append(orders)
    assert [sorted(order) for order in runs[0]] == [list(range(10, 17))] * 3
    assert runs[0][0] != runs[0][1] != runs[0][2] != runs[0][0]
    assert runs[0] == runs[1]


# ---- when the policy rests


def test_a_limit_is_looked_at_one_note_late_and_holds_until_it_is_reset() -> None:
    limit, seen = KLLimit(0.1), []
    for kl in (0.0, 0.05, 0.2, 0.0):
        seen.append(limit.exceeded())
        limit.note(torch.tensor(kl))
    assert seen == [False, False, False, True]
    assert limit.exceeded()  # although the last note was below it
    again = KLLimit(0.1)
    again.load_state_dict(limit.state_dict())
    assert again.exceeded()
    limit.reset()
    assert not limit.exceeded()
    limit.note(torch.tensor(0.2))
    again.load_state_dict(limit.state_dict())  # noted, and not looked at yet
    assert again.exceeded()
    without = KLLimit(None)
    without.note(torch.tensor(1e9))
    assert not without.exceeded()


# ---- in a fit


class Watch(L.Callback):
    """After every step: both models and what was logged."""

    def __init__(self) -> None:
        self.policies, self.critics, self.metrics = [], [], []

    def on_train_start(self, trainer, pl_module) -> None:
        self.start = _flat(pl_module.policy)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.policies.append(_flat(pl_module.policy))
        self.critics.append(_flat(pl_module.critic))
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    def moved(self, models: str) -> list[bool]:
        """Whether a step, from the second on, changed the policies or the critics."""
        each = getattr(self, models)
        return [not torch.equal(a, b) for a, b in zip(each, each[1:], strict=False)]


class Emptied(L.Callback):
    """Looks at both models and their optimizers whenever prompts are played."""

    def setup(self, trainer, pl_module, stage) -> None:
        play = trainer.callbacks[1].play

        def look(*args, **kwargs):
            held = [p._local_tensor for name in ("policy", "critic") for p in getattr(pl_module, name).parameters()]
            if trainer.global_step:
                states = [state for optimizer in trainer.strategy.optimizers for state in optimizer.state.values()]
                assert len(states) == len(held)
                held += [state["exp_avg"]._local_tensor for state in states]
            assert all(x.untyped_storage().nbytes() == 0 for x in held)
            return play(*args, **kwargs)

        trainer.callbacks[1].play = look


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().flatten().clone() for p in model.parameters()])


OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_ratio=0.0)


def fit(
    model: str,
    task: str,
    root: Path,
    *,
    steps: int,
    callbacks: tuple = (),
    ckpt_path: Path | None = None,
    offload="none",
    trainer: dict | None = None,
    **settings,
) -> tuple[Watch, PPO, L.Trainer]:
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)  # a resumed run does not live off its seed
    watch = Watch()
    module = PPO(
        model,
        **{
            "optimizer": OPTIMIZER,
            "critic_optimizer": OptimizerConfig(lr=3e-3, schedule="linear", warmup_ratio=0.0),
            "sampling": SamplingParams(max_tokens=6),
            "samples_per_prompt": 2,
        }
        | settings,
    )
    fitting = quiet_trainer(
        root,
        watch,
        RolloutCallback(environment=task),
        *callbacks,
        strategy=FSDP2TPStrategy(offload=offload),
        max_steps=steps,
        limit_val_batches=0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **(trainer or {}),
    )
    data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=8, val_ratio=0.0)
    fitting.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return watch, module, fitting


def test_a_batch_is_one_step_of_each_model_each_on_its_own_schedule(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch, module, trainer = fit(tiny_model, task, tmp_path, steps=6, epochs=2, mini_batches=2)
    assert trainer.global_step == 6
    assert all(watch.moved("policies"))
    assert all(watch.moved("critics"))
    rates = [metrics["train/learning_rate"] for metrics in watch.metrics]
    assert rates == pytest.approx([1e-2 * OPTIMIZER.lr_at(step, 6) for step in range(6)])
    critic_rates = [metrics["train/critic_learning_rate"] for metrics in watch.metrics]
    assert critic_rates == pytest.approx([3e-3 * (1 - step / 6) for step in range(6)])
    ratios = [metrics["train/approx_kl"] for metrics in watch.metrics]
    assert ratios[0] == pytest.approx(0, abs=1e-7)  # old log-probs were scored once, before the first step
    assert min(ratios[1:4]) > 1e-4
    assert ratios[4] == pytest.approx(0, abs=1e-7)  # of the next rollout
    assert module.experience is not None  # two of its four updates are still to come


def test_both_models_make_room_while_an_engine_generates(tiny_model: str, task: str, tmp_path: Path) -> None:
    stays, _, _ = fit(tiny_model, task, tmp_path, steps=2)
    leaves, _, _ = fit(tiny_model, task, tmp_path, steps=2, offload="all", callbacks=(Emptied(),))
    for name in ("policies", "critics"):
        assert torch.equal(getattr(stays, name)[-1], getattr(leaves, name)[-1])


def test_beyond_the_limit_the_policy_rests_and_the_critic_goes_on(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch, _, trainer = fit(tiny_model, task, tmp_path, steps=6, epochs=4, target_kl=1e-5)
    # the first step of a rollout finds no KL, the second finds it, the others rest
    assert [metrics["train/policy_rests"] for metrics in watch.metrics] == [0, 0, 1, 1, 0, 0]
    assert watch.moved("policies") == [True, False, False, True, True]
    assert all(watch.moved("critics"))
    assert trainer.global_step == 6


def test_a_policy_that_rests_logs_nothing_of_its_own(tiny_model: str, task: str, tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    class Log(L.pytorch.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None) -> None:
            logged.append(metrics)

    logger = Log(tmp_path)
    fit(
        tiny_model,
        task,
        tmp_path,
        steps=6,
        epochs=4,
        target_kl=1e-5,
        trainer={"logger": logger, "log_every_n_steps": 1},
    )
    steps = [metrics for metrics in logged if "train/policy_rests" in metrics]
    assert [metrics["train/policy_rests"] for metrics in steps] == [0, 0, 1, 1, 0, 0]
    for name in ("loss", "grad_norm", "approx_kl", "ratio", "skipped_steps"):
        assert [f"train/{name}" in metrics for metrics in steps] == [True, True, False, False, True, True]
        assert all(f"train/critic_{name}" in metrics for metrics in steps) == (name not in ("approx_kl", "ratio"))
    assert all("train/learning_rate" in metrics for metrics in steps)


def test_a_limit_holds_for_a_loss_without_a_ratio(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch, _, _ = fit(tiny_model, task, tmp_path, steps=3, epochs=3, target_kl=1e-5, policy_loss=Reinforce())
    assert [metrics["train/policy_rests"] for metrics in watch.metrics] == [0, 0, 1]


def test_a_limit_needs_a_loss_that_tells_the_kl(tiny_model: str, task: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(PPO, "loss", lambda self, seqs: (-seqs.advantages * self.logps(seqs)[0], {}))
    with pytest.raises(ValueError, match="target_kl needs a loss that returns the diagnostic 'approx_kl'"):
        fit(tiny_model, task, tmp_path, steps=1, target_kl=0.1)


@pytest.mark.parametrize("target", ["monte_carlo", "bootstrapped"])
def test_a_warm_up_moves_the_critic_alone(tiny_model: str, task: str, tmp_path: Path, target) -> None:
    watch, module, trainer = fit(
        tiny_model, task, tmp_path, steps=5, mini_batches=2, callbacks=(CriticWarmup(3, target),)
    )
    assert torch.equal(watch.policies[0], watch.start)
    # the second rollout begins within the warm-up, and so belongs to it as a whole
    assert watch.moved("policies") == [False, False, False, True]
    assert all(watch.moved("critics"))
    assert trainer.global_step == 5
    assert [metrics["train/policy_rests"] for metrics in watch.metrics] == [1, 1, 1, 1, 0]
    assert module.num_tokens_in_step > 0
    assert module.critic_warmup is None


def test_a_warm_up_says_how_long_it_is_in_whole_rollouts(tiny_model: str, task: str, tmp_path: Path, caplog) -> None:
    with caplog.at_level("INFO"):
        fit(tiny_model, task, tmp_path, steps=5, mini_batches=2, callbacks=(CriticWarmup(3),))
    assert caplog.text.count("the critic alone learns for the first 4 steps") == 1


def test_a_warm_up_that_leaves_the_policy_no_step_warns(tiny_model: str, task: str, tmp_path: Path) -> None:
    message = r"\(num_steps=3, in whole rollouts 4\) takes all 4 steps of this run, .* lower num_steps of CriticWarmup"
    with pytest.warns(UserWarning, match=message):
        watch, _, _ = fit(tiny_model, task, tmp_path, steps=4, mini_batches=2, callbacks=(CriticWarmup(3),))
    assert not any(watch.moved("policies"))


def test_more_mini_batches_than_samples_are_refused_before_anything_is_generated(
    tiny_model: str, task: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(RolloutCallback, "play", lambda *_, **__: pytest.fail("generated"))
    with pytest.raises(ValueError, match=r"mini_batches=17 cannot share out the 16 samples .* to 16 at most"):
        fit(tiny_model, task, tmp_path, steps=17, mini_batches=17)


def test_as_many_mini_batches_as_samples_are_taken(tiny_model: str, task: str, tmp_path: Path) -> None:
    _, _, trainer = fit(tiny_model, task, tmp_path, steps=1, mini_batches=16)
    assert trainer.global_step == 1


def test_a_warm_up_without_a_critic_is_refused(tiny_model: str, task: str, tmp_path: Path) -> None:
    from rl2lightning import GRPO

    trainer = quiet_trainer(tmp_path, CriticWarmup(3), limit_val_batches=0)
    with pytest.raises(ValueError, match="GRPO has no critic to warm up: take CriticWarmup out, or use PPO"):
        trainer.fit(GRPO(tiny_model), datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4))


# ---- checkpoints


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_both_models_resume_bit_for_bit_between_the_updates_of_a_rollout(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    """In the warm-up, past it and where the policy rests; and to a run that saves, saving is nothing."""
    settings = {"steps": 6, "epochs": 2, "mini_batches": 2, "kl": KLPenalty(0.1, "k1", "reward"), "target_kl": 0.02}
    warmup = CriticWarmup(2)
    unsaved, _, _ = fit(tiny_model, task, tmp_path / "unsaved", callbacks=(warmup,), **settings)
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _, _ = fit(tiny_model, task, tmp_path, callbacks=(warmup, every), **settings)
    resting = [metrics["train/policy_rests"] for metrics in whole.metrics]
    assert resting[:2] == [1, 1]
    assert 0 in resting[2:]
    for step in (0, 1, 2, 5):
        ours = unsaved
        if step:
            path = tmp_path / f"step={step}.ckpt"
            ours, _, _ = fit(tiny_model, task, tmp_path / "more", callbacks=(warmup,), ckpt_path=path, **settings)
        assert len(ours.metrics) == 6 - step
        for theirs, metrics in zip(whole.metrics[step:], ours.metrics, strict=True):
            assert {n: x for n, x in metrics.items() if n.startswith("train/")}.items() <= theirs.items(), step
        for name in ("policies", "critics"):
            for a, b in zip(getattr(ours, name), getattr(whole, name)[step:], strict=True):
                assert torch.equal(a, b), (name, step)


def test_policy_and_critic_are_exported_and_a_critic_starts_from_such_a_directory(
    tiny_model: str, make_model, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, trainer = fit(tiny_model, task, tmp_path, steps=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trained = {name: p.full_tensor().clone() for name, p in module.critic.lm.named_parameters()}
    policy = export(str(tmp_path / "one.ckpt"), str(tmp_path / "policy"), dtype="float32")
    critic = export(str(tmp_path / "one.ckpt"), str(tmp_path / "critic"), dtype="float32", submodule="critic")
    assert AutoConfig.from_pretrained(policy).architectures == ["Qwen3ForCausalLM"]
    loaded = AutoModelForSequenceClassification.from_pretrained(critic)
    assert loaded.config.problem_type == "regression"
    for name, p in loaded.named_parameters():
        assert torch.equal(p, trained[name]), name
    # validation has no use for a critic; a policy of other width is given the critic as it is
    other = make_model(hidden_size=16)
    still = OptimizerConfig(lr=0.0)
    _, module, trainer = fit(other, task, tmp_path, steps=1, critic_model=str(critic), critic_optimizer=still)
    for name, p in module.critic.lm.named_parameters():
        assert torch.equal(p.full_tensor(), trained[name]), name
    monkeypatch.setattr(ppo, "resolve_model", None)  # it was looked up, and is not again
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = export(str(tmp_path / "two.ckpt"), str(tmp_path / "again"), dtype="float32", submodule="critic")
    for name, p in AutoModelForSequenceClassification.from_pretrained(again).named_parameters():
        assert torch.equal(p, trained[name]), name
    assert AutoConfig.from_pretrained(export(str(tmp_path / "two.ckpt"), str(tmp_path / "p"))).hidden_size == 16


@pytest.mark.filterwarnings("ignore:data.path")  # of which a part is held out now
def test_validation_of_a_checkpoint_builds_no_critic_and_a_fit_after_it_does(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    _, _, trainer = fit(tiny_model, task, tmp_path, steps=1, epochs=2)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module = PPO(tiny_model, sampling=SamplingParams(max_tokens=6), epochs=2)
    trainer = quiet_trainer(tmp_path, RolloutCallback(environment=task), max_steps=2)
    data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=8, val_ratio=0.1)
    trainer.validate(module, datamodule=data, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert module.critic is None
    trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "one.ckpt")
    assert list(module.trained) == ["policy", "critic"]
    assert trainer.global_step == 2


def test_a_critic_of_fewer_words_than_the_policy_is_refused(
    tiny_model: str, make_model, task: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"knows 50 words where the policy knows 104: set model\.init_args\.critic_model"
    ):
        fit(tiny_model, task, tmp_path, steps=1, critic_model=make_model(vocab_size=50))


def test_a_critic_that_numbers_tokens_otherwise_is_refused(
    tiny_model: str, make_model, task: str, tmp_path: Path
) -> None:
    critic, mine = Path(make_model()), Path(tiny_model)
    words = json.loads((mine / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (critic / "tokenizer.json").write_text(json.dumps(words))
    (critic / "tokenizer_config.json").write_text((mine / "tokenizer_config.json").read_text())
    with pytest.raises(ValueError, match=r"its tokenizer has another number for '[12]': set model"):
        fit(tiny_model, task, tmp_path, steps=1, critic_model=str(critic))
