"""GRPO: what it refuses, where its KL goes, how it shares out a rollout, when its reference moves."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from quiet import quiet_trainer
from torch import nn

from rl2lightning import GRPO, OptimizerConfig, PromptDataModule, RolloutCallback
from rl2lightning.estimators import GAE, GroupRelative, MonteCarlo, VTrace
from rl2lightning.policy_losses import KLPenalty, MismatchCorrection, Reinforce
from rl2lightning.types import SamplingParams, Sequences, StructuredOutput

# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"updates_per_rollout": 0}, "^updates_per_rollout=0 must be at least 1$"),
        ({"samples_per_prompt": 0}, "samples_per_prompt=0 must be at least 1"),
        ({"sampling": {"max_tokens": 8}}, r"sampling=\{'max_tokens': 8\} must be SamplingParams, as in Sampling"),
        ({"sampling": SamplingParams(temperature=0.0)}, r"sampling\.temperature=0 .* positive temperature"),
        ({"advantage": GAE()}, "GAE needs a critic"),
        ({"mismatch": MismatchCorrection(), "sampling": SamplingParams(top_p=0.9)}, r"sampling\.top_p=0\.9 cuts"),
        (
            {"mismatch": MismatchCorrection(), "sampling": SamplingParams(top_k=5)},
            r"sampling\.top_k=5 cuts.*top_k, min_p and min",
        ),
        ({"mismatch": MismatchCorrection(), "sampling": SamplingParams(min_p=0.1)}, r"mismatch to null"),
        ({"reference_every": 5}, r"reference_every=5 needs a reference: set kl\.coef"),
        ({"max_nonfinite_steps": 0}, "max_nonfinite_steps=0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_out(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO("some/model", **settings)


def test_two_corrections_of_one_mismatch_are_refused() -> None:
    class WithoutCritic(VTrace):  # every estimator that corrects the mismatch so far needs a critic, which comes first
        @property
        def needs_values(self) -> bool:
            return False

    GRPO("some/model", advantage=WithoutCritic())
    with pytest.raises(ValueError, match="WithoutCritic corrects the rollout mismatch already: set mismatch to null"):
        GRPO("some/model", advantage=WithoutCritic(), mismatch=MismatchCorrection())


def test_defaults_that_depend_on_other_settings() -> None:
    module = GRPO("some/model", sampling=SamplingParams(max_tokens=77, temperature=0.5))
    assert module.loss_length == 77
    assert module.eval_sampling == SamplingParams(max_tokens=77, temperature=0.0)
    assert GRPO("some/model", loss_length=5).loss_length == 5
    ends = {"max_tokens": 77, "stop": ("</answer>",), "stop_token_ids": (5,)}
    module = GRPO("some/model", sampling=SamplingParams(**ends, top_p=0.9))
    assert module.eval_sampling == SamplingParams(**ends, temperature=0.0)  # a turn ends where it does in training


# ---- the KL, by hand


def rollout() -> Sequences:
    """Two samples of a prompt: p a a with reward 1, p a with reward 0."""
    return Sequences.from_lists(
        [[5, 6, 7], [5, 8]],
        [[False, True, True], [False, True]],
        [0, 0],
        rewards=[[0.0, 0.0, 1.0], [0.0, 0.0]],
    )


OLD = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5])
REF = torch.tensor([0.0, -1.5, -1.0, 0.0, -0.5])  # old - ref = 0.5, -1 and 0


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch):
    """A GRPO whose models give the log-probs above, without a trainer."""

    def make(**settings) -> GRPO:
        module = GRPO("some/model", **settings)
        module.policy, module.reference = nn.Identity(), nn.Identity()
        known = {id(module.policy): OLD, id(module.reference): REF}
        scored: list[str] = []
        names = {id(module.policy): "policy", id(module.reference): "reference"}

        def score(model: nn.Module, seqs: Sequences) -> torch.Tensor:
            scored.append(names[id(model)])
            return known[id(model)]

        monkeypatch.setattr(module, "score", score)
        monkeypatch.setattr(module, "log", lambda name, x, **kwargs: module.logged.update({name: float(x)}))
        monkeypatch.setattr(module, "logps", lambda seqs, entropy: (OLD + 0.1 * seqs.action_mask, None))
        module.logged, module.scored = {}, scored
        module._trainer = SimpleNamespace(global_step=3)
        return module

    return make


def test_kl_in_the_reward_is_taken_off_each_token_before_the_advantages(scored) -> None:
    module = scored(kl=KLPenalty(0.1, "k1", "reward"), advantage=GroupRelative(divide_by_std=False))
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.rewards, torch.tensor([0.0, -0.05, 1.1, 0.0, 0.0]))
    # totals 1.05 and 0, centred
    torch.testing.assert_close(seqs.advantages, torch.tensor([0.0, 0.525, 0.525, 0.0, -0.525]))
    assert module.logged == {"train/kl": pytest.approx(-0.5 / 3)}


def test_kl_in_the_advantage_is_taken_off_each_token_after_them(scored) -> None:
    module = scored(kl=KLPenalty(0.1, "k1", "advantage"), advantage=GroupRelative(divide_by_std=False))
    seqs = module.learn_from(rollout())
    torch.testing.assert_close(seqs.rewards, rollout().rewards)
    torch.testing.assert_close(seqs.advantages, torch.tensor([0.0, 0.5 - 0.05, 0.5 + 0.1, 0.0, -0.5]))


def test_kl_in_the_loss_is_that_of_the_current_policy(scored) -> None:
    with_kl, without = scored(kl=KLPenalty(0.1, "k2", "loss")), scored()
    seqs = with_kl.learn_from(rollout())
    assert with_kl.scored == ["reference"]  # on-policy: no second pass for old log-probs
    loss, logged = with_kl.loss(seqs)
    plain, _ = without.loss(seqs)
    kl = torch.tensor([0.0, 0.6**2 / 2, 0.9**2 / 2, 0.0, 0.1**2 / 2])  # the policy is 0.1 above old by now
    torch.testing.assert_close(logged["kl"], kl)
    torch.testing.assert_close(loss - plain, 0.1 * kl)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["reference"]),
        ({"kl": KLPenalty(0.1, "k1", "reward")}, ["policy", "reference"]),
        ({"kl": KLPenalty(0.1, "k1", "advantage")}, ["policy", "reference"]),
        ({"updates_per_rollout": 2}, ["policy", "reference"]),
        ({"policy_loss": Reinforce()}, ["reference"]),
        ({"updates_per_rollout": 2, "policy_loss": Reinforce()}, ["policy", "reference"]),
    ],
)
def test_old_logps_are_scored_only_where_something_needs_them(scored, settings: dict, expected: list[str]) -> None:
    module = scored(**settings)
    module.learn_from(rollout())
    assert module.scored == expected


def test_a_correction_weighs_the_policy_term_and_not_the_kl(scored) -> None:
    roll = OLD - torch.tensor([0.0, math.log(2.0), math.log(0.5), 0.0, math.log(8.0)])  # old / roll: 2, 0.5, 8
    plain, corrected = scored(kl=KLPenalty(0.1)), scored(kl=KLPenalty(0.1), mismatch=MismatchCorrection(cap=4.0))
    seqs = plain.learn_from(rollout()).replace(rollout_logps=roll, old_logps=OLD)
    loss, logged = plain.loss(seqs)
    weighted, _ = corrected.loss(seqs)
    policy_term = loss - 0.1 * logged["kl"]
    torch.testing.assert_close(
        weighted, policy_term * torch.tensor([0.0, 2.0, 0.5, 0.0, 4.0]) + 0.1 * logged["kl"], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(logged["mismatch_abs"], (OLD - roll).abs())


def test_a_correction_weighs_a_kl_that_is_part_of_the_advantage(scored) -> None:
    roll = OLD - torch.tensor([0.0, math.log(2.0), math.log(0.5), 0.0, math.log(8.0)])
    module = scored(
        kl=KLPenalty(0.1, "k1", "advantage"),
        advantage=GroupRelative(divide_by_std=False),
        policy_loss=Reinforce(),
        mismatch=MismatchCorrection(cap=4.0),
    )
    loss, _ = module.loss(module.learn_from(rollout()).replace(rollout_logps=roll))
    advantages = torch.tensor([0.0, 0.5 - 0.05, 0.5 + 0.1, 0.0, -0.5])
    logps = OLD + torch.tensor([0.0, 0.1, 0.1, 0.0, 0.1])
    torch.testing.assert_close(loss, -torch.tensor([0.0, 2.0, 0.5, 0.0, 4.0]) * advantages * logps)


def test_later_updates_without_a_ratio_still_know_how_far_they_have_come(scored) -> None:
    module = scored(updates_per_rollout=2, policy_loss=Reinforce())
    _, logged = module.loss(module.learn_from(rollout()))  # in which the policy is 0.1 above old
    k3 = math.exp(0.1) - 1 - 0.1
    torch.testing.assert_close(logged["approx_kl"], torch.tensor([0.0, k3, k3, 0.0, k3]))


def test_the_entropy_bonus_lowers_the_loss(scored, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for coef, log_entropy in ((0.0, True), (0.2, False)):
        module = scored(entropy_coef=coef, log_entropy=log_entropy)
        asked = []

        def logps(seqs, entropy, asked=asked):
            asked.append(entropy)
            return OLD.clone(), 2.0 * seqs.action_mask

        monkeypatch.setattr(module, "logps", logps)
        loss, logged = module.loss(module.learn_from(rollout()))
        losses.append(loss)
        assert asked == [True]
        assert logged["entropy"].tolist() == [0, 2, 2, 0, 2]
    torch.testing.assert_close(losses[1], losses[0] - 0.4 * rollout().action_mask)


# ---- shares of a rollout


@pytest.mark.parametrize(("num_sequences", "num_updates"), [(8, 2), (7, 3), (2, 4), (5, 5), (6, 1)])
def test_the_updates_of_a_rollout_share_its_sequences_out(num_sequences: int, num_updates: int) -> None:
    module = GRPO("some/model", updates_per_rollout=num_updates)
    seqs = Sequences.from_lists([[1, i] for i in range(num_sequences)], [[False, True]] * num_sequences)
    shares = [module.share(seqs, step) for step in range(num_updates)]
    sizes = [0 if share is None else len(share) for share in shares]
    assert sum(sizes) == num_sequences
    assert max(sizes) - min(sizes) <= 1
    tokens = torch.cat([share.input_ids for share in shares if share is not None])
    assert tokens.tolist() == seqs.input_ids.tolist()  # every sequence once


@pytest.mark.parametrize(("num_updates", "refused"), [(9, True), (8, False)])
def test_more_updates_than_samples_are_refused(num_updates: int, refused: bool) -> None:
    module = GRPO("some/model", samples_per_prompt=4, updates_per_rollout=num_updates)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(prompts_per_rollout=2))
    message = r"updates_per_rollout=9 .* the 8 samples .*model\.init_args\.updates_per_rollout to 8 at most"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        module.on_fit_start()


def test_several_updates_see_the_samples_shuffled_by_the_step_alone(scored) -> None:
    seqs = Sequences.from_lists([[1, i] for i in range(10, 15)], [[False, True]] * 5, [0] * 5, rewards=[[0.0, 1.0]] * 5)
    module = scored(updates_per_rollout=2)
    module.score = lambda model, seqs: torch.zeros(10)
    orders = []
    for step in (3, 3, 4):
        module._trainer = SimpleNamespace(global_step=step)
        torch.manual_seed(step + len(orders))
        orders.append(module.learn_from(seqs).input_ids[1::2].tolist())
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == [10, 11, 12, 13, 14]


def test_a_rollout_that_nobody_generated_is_none(scored) -> None:
    module = scored()
    assert module.learn_from(None) is None
    assert module.share(None, 0) is None


# ---- in a fit


class Watch(L.Callback):
    """After every step: policy, reference and what was logged."""

    def __init__(self) -> None:
        self.policies, self.references, self.metrics = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.policies.append(_flat(pl_module.policy))
        self.references.append(_flat(pl_module.reference) if pl_module.reference is not None else None)
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().flatten().clone() for p in model.parameters()])


def fit(model: str, task: str, root: Path, *, steps: int, callbacks: tuple = (), **settings) -> Watch:
    watch = Watch()
    module = GRPO(
        model,
        optimizer=OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0),
        sampling=SamplingParams(max_tokens=6),
        samples_per_prompt=4,
        **settings,
    )
    trainer = quiet_trainer(root, watch, *(callbacks or [RolloutCallback(environment=task)]), max_steps=steps)
    trainer.fit(module, datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.0))
    return watch


def test_the_reference_follows_every_so_many_steps(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch = fit(tiny_model, task, tmp_path, steps=5, kl=KLPenalty(0.1), reference_every=2)
    first, second, third, fourth, fifth = watch.references
    assert not torch.equal(first, watch.policies[0])
    for reference, policy in ((second, 1), (third, 1), (fourth, 3), (fifth, 3)):
        assert torch.equal(reference, watch.policies[policy])
    assert not torch.equal(first, second)
    assert watch.metrics[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert watch.metrics[1]["train/kl"] > 1e-4
    assert watch.metrics[2]["train/kl"] == pytest.approx(0.0, abs=1e-6)  # equal again


def test_without_a_kl_no_reference_is_loaded_and_with_one_it_stays(tiny_model: str, task: str, tmp_path: Path) -> None:
    assert fit(tiny_model, task, tmp_path, steps=1).references == [None]
    watch = fit(tiny_model, task, tmp_path, steps=3, kl=KLPenalty(0.1))
    assert torch.equal(watch.references[0], watch.references[2])
    assert not torch.equal(watch.policies[0], watch.policies[2])


def test_the_engine_samples_from_what_is_trained(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch = fit(tiny_model, task, tmp_path, steps=3, mismatch=MismatchCorrection())
    for metrics in watch.metrics:
        assert metrics["train/mismatch_max"] < 1e-4
        assert metrics["train/mismatch_exp_abs"] == pytest.approx(1.0, abs=1e-4)


def test_rewards_go_up(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch = fit(tiny_model, task, tmp_path, steps=12)
    rewards = [metrics["rollout/reward"] for metrics in watch.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_monte_carlo_without_a_critic_is_allowed(tiny_model: str, task: str, tmp_path: Path) -> None:
    watch = fit(tiny_model, task, tmp_path, steps=1, advantage=MonteCarlo(use_values=False), loss_level="token")
    assert math.isfinite(watch.metrics[0]["train/loss"])


# ---- nothing lost, nothing misread


def test_a_sequence_whose_advantage_is_not_a_number_is_left_to_the_guard(scored) -> None:
    seqs = rollout().replace(advantages=torch.tensor([0.0, float("nan"), 0.0, 0.0, 0.0]))
    assert scored().worth_a_pass(seqs).input_ids.tolist() == [5, 6, 7]  # the flat one is dropped, this one is not


def test_a_constant_level_over_several_turns_needs_its_length() -> None:
    with pytest.raises(ValueError, match=r"with max_turns=3 set model\.init_args\.loss_length"):
        GRPO("some/model", loss_level="constant").check_turns(3)
    GRPO("some/model", loss_level="constant", loss_length=3072).check_turns(3)
    GRPO("some/model", loss_level="constant").check_turns(1)


def test_refilled_groups_are_put_in_the_order_of_their_numbers(scored) -> None:
    seqs = rollout().replace(group_ids=torch.tensor([7, 2]))
    assert scored(advantage=MonteCarlo(use_values=False)).learn_from(seqs).input_ids.tolist() == [5, 8, 5, 6, 7]


def test_the_order_of_several_updates_follows_the_seed_of_the_run(scored, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Sequences.from_lists(
        [[5, 6]] * 30, [[False, True]] * 30, list(range(30)), rewards=[[0.0, float(i)] for i in range(30)]
    )
    orders = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        module = scored(updates_per_rollout=2, advantage=MonteCarlo(use_values=False))
        module.reference = None
        monkeypatch.setattr(module, "score", lambda model, seqs: torch.zeros(seqs.num_tokens))
        orders.append(module.learn_from(many).group_ids.tolist())
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("settings", [{"kl": KLPenalty(0.1)}, {"updates_per_rollout": 2}])
def test_bf16_true_scores_and_trains(tiny_model: str, task: str, tmp_path: Path, settings: dict) -> None:
    module = GRPO(tiny_model, sampling=SamplingParams(max_tokens=4), samples_per_prompt=4, **settings)
    options = {"precision": "bf16-true", "max_steps": 2, "limit_val_batches": 0}
    trainer = quiet_trainer(tmp_path, RolloutCallback(environment=task), **options)
    trainer.fit(module, datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4))
    assert {p.dtype for p in module.policy.parameters()} == {torch.bfloat16}
    assert torch.isfinite(trainer.callback_metrics["train/grad_norm"])
    assert trainer.callback_metrics["train/grad_norm"].dtype == torch.float32


class Corrected(GroupRelative):
    """An estimator that weighs by old / rollout probabilities itself."""

    @property
    def corrects_mismatch(self) -> bool:
        return True


@pytest.mark.parametrize("who", ["mismatch", "advantage"])
def test_log_probs_of_a_part_of_the_distribution_are_not_weighed_with(who: str) -> None:
    form = StructuredOutput(regex="[0-9]+")
    every = SamplingParams(top_p=0.9, top_k=5, min_p=0.1, min_tokens=2, structured=form)
    corrects = {"mismatch": MismatchCorrection()} if who == "mismatch" else {"advantage": Corrected()}
    names = (
        r"sampling\.top_p=0\.9, sampling\.top_k=5, sampling\.min_p=0\.1, sampling\.min_tokens=2, sampling\.structured "
    )
    with pytest.raises(ValueError, match=f"{'Corrected' if who == 'advantage' else 'mismatch correction'}.*{names}"):
        GRPO("model", sampling=every, **corrects)
    GRPO("model", sampling=every)  # nothing is weighed
    GRPO("model", sampling=SamplingParams(stop=("x",), stop_token_ids=(3,), temperature=0.5), **corrects)
