"""Losses of preference data: a pair of a chosen and a rejected answer, or one answer with a label.

Small frozen settings over `functional/losses.py`. They are given one log-prob per answer (all its tokens together) from
the policy and, if they need it, from the reference, and return unreduced values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from rl2lightning.functional import losses, ranges


class PreferenceLoss(ABC):
    """The loss of pairs from the log-probs of their answers, each the sum over the answer's tokens or their mean."""

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the reference go into it; if not, no reference is loaded."""
        return True

    @property
    def uses_means(self) -> bool:
        """Whether an answer's log-prob is the mean over its tokens; otherwise their sum."""
        return False

    @property
    def nll_weight(self) -> float:
        """Weight of the mean negative log-likelihood of the chosen answers' tokens, added to the loss; 0: none."""
        return 0.0

    @abstractmethod
    def __call__(
        self, chosen: Tensor, rejected: Tensor, chosen_ref: Tensor | None, rejected_ref: Tensor | None
    ) -> Tensor:
        """The loss [P] of pairs.

        Args:
            chosen, rejected: [P] log-probs of the answers, sums or means (`uses_means`).
            chosen_ref, rejected_ref: [P] likewise by the reference; None if it is not needed.
        """

    @abstractmethod
    def rewards(self, logps: Tensor, ref_logps: Tensor | None) -> Tensor:
        """What the loss takes for the reward of answers, from their log-probs, all of one shape; it is logged."""


@dataclass(frozen=True)
class ImitatingLoss(PreferenceLoss):
    """A loss that may imitate the chosen answers, too, with the weight `nll_coef`."""

    nll_coef: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        ranges.not_negative("nll_coef", self.nll_coef)

    @property
    def nll_weight(self) -> float:
        return self.nll_coef


@dataclass(frozen=True)
class MarginLoss(ImitatingLoss):
    """A function of h, beta times how much further from the reference the policy has gone for chosen than rejected.

    Args:
        beta: how close to the reference the policy stays: the larger, the closer.
        length_normalised: take means over the tokens of an answer instead of sums. beta stays as it is set, and has to
            be set some 50 times larger with it, for it then counts per token (5 with Tulu 3, arXiv:2411.15124).
        nll_coef: weight of the negative log-likelihood of the chosen answers (RPO, arXiv:2404.19733, which takes 1).
    """

    beta: float = 0.1
    length_normalised: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.positive("beta", self.beta)

    @property
    def uses_means(self) -> bool:
        return self.length_normalised

    def __call__(
        self, chosen: Tensor, rejected: Tensor, chosen_ref: Tensor | None, rejected_ref: Tensor | None
    ) -> Tensor:
        assert chosen_ref is not None and rejected_ref is not None
        return self.of_margin(self.beta * losses.preference_margin(chosen, rejected, chosen_ref, rejected_ref))

    @abstractmethod
    def of_margin(self, h: Tensor) -> Tensor:
        """The loss [P] of h [P]."""

    def rewards(self, logps: Tensor, ref_logps: Tensor | None) -> Tensor:
        assert ref_logps is not None
        return self.beta * (logps - ref_logps)


@dataclass(frozen=True)
class Sigmoid(MarginLoss):
    """DPO (Rafailov et al., 2023, arXiv:2305.18290): -log sigmoid(h).

    Args:
        beta: see `MarginLoss`, as for the arguments that are not listed here.
        label_smoothing: share of pairs taken to be labelled the wrong way round (conservative DPO).
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} must lie in [0, 0.5)")

    def of_margin(self, h: Tensor) -> Tensor:
        return losses.dpo_sigmoid(h, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Robust(MarginLoss):
    """Robust DPO (Chowdhury et al., 2024, arXiv:2403.00409): unbiased where labels are flipped at a known rate.

    Args:
        beta: see `MarginLoss`, as for the arguments that are not listed here.
        flip_rate: share of pairs that are labelled the wrong way round.
    """

    flip_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.flip_rate < 0.5:
            raise ValueError(f"flip_rate={self.flip_rate} must lie in [0, 0.5): at 0.5 the labels say nothing")

    def of_margin(self, h: Tensor) -> Tensor:
        return losses.dpo_robust(h, label_smoothing=self.flip_rate)


@dataclass(frozen=True)
class Hinge(MarginLoss):
    """max(0, 1 - h), of SLiC (Zhao et al., 2023, arXiv:2305.10425): a pair won by enough teaches nothing more."""

    def of_margin(self, h: Tensor) -> Tensor:
        return losses.dpo_hinge(h)


@dataclass(frozen=True)
class IPO(ImitatingLoss):
    """IPO (Azar et al., 2023, arXiv:2310.12036): the squared distance of the margin to a target, from means.

    Departs from the paper, whose sums over tokens make the target depend on the length of the answers.

    Args:
        per_token_beta: how close to the reference the policy stays: the margin per token aims at
            1 / (2 per_token_beta) nats. It has a name of its own because the command line hands fields of equal name on
            from one class to the next, and that of DPO, for sums, is far too small here.
        nll_coef: weight of the negative log-likelihood of the chosen answers.
    """

    per_token_beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.positive("per_token_beta", self.per_token_beta)

    @property
    def uses_means(self) -> bool:
        return True

    def __call__(
        self, chosen: Tensor, rejected: Tensor, chosen_ref: Tensor | None, rejected_ref: Tensor | None
    ) -> Tensor:
        assert chosen_ref is not None and rejected_ref is not None
        margin = losses.preference_margin(chosen, rejected, chosen_ref, rejected_ref)
        return losses.ipo(margin, beta=self.per_token_beta)

    def rewards(self, logps: Tensor, ref_logps: Tensor | None) -> Tensor:
        assert ref_logps is not None
        return self.per_token_beta * (logps - ref_logps)


@dataclass(frozen=True)
class SimPO(ImitatingLoss):
    """SimPO (Meng et al., 2024, arXiv:2405.14734): mean log-probs are the rewards, and there is no reference.

    Args:
        per_token_beta: factor of the mean log-probs; 2 to 10 in the paper. It has a name of its own because the command
            line hands fields of equal name on from one class to the next, and that of DPO is far too small here.
        gamma: by how much the chosen answer's reward is to win; about half of per_token_beta in the paper.
        nll_coef: weight of the negative log-likelihood of the chosen answers.
    """

    per_token_beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.positive("per_token_beta", self.per_token_beta)
        ranges.not_negative("gamma", self.gamma)

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def uses_means(self) -> bool:
        return True

    def __call__(
        self, chosen: Tensor, rejected: Tensor, chosen_ref: Tensor | None, rejected_ref: Tensor | None
    ) -> Tensor:
        return losses.simpo(chosen, rejected, beta=self.per_token_beta, gamma=self.gamma)

    def rewards(self, logps: Tensor, ref_logps: Tensor | None) -> Tensor:
        return self.per_token_beta * logps


@dataclass(frozen=True)
class ORPO(PreferenceLoss):
    """ORPO (Hong et al., 2024, arXiv:2403.07691): imitates the chosen answers and, besides, raises their odds.

    Args:
        lam: weight of the odds ratio beside the negative log-likelihood of the chosen answers, whose weight is 1.
    """

    lam: float = 0.1

    def __post_init__(self) -> None:
        ranges.not_negative("lam", self.lam)

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def uses_means(self) -> bool:
        return True

    @property
    def nll_weight(self) -> float:
        return 1.0

    def __call__(
        self, chosen: Tensor, rejected: Tensor, chosen_ref: Tensor | None, rejected_ref: Tensor | None
    ) -> Tensor:
        return self.lam * losses.orpo_odds_ratio(chosen, rejected)

    def rewards(self, logps: Tensor, ref_logps: Tensor | None) -> Tensor:
        return self.lam * logps


@dataclass(frozen=True)
class KTOLoss:
    """KTO (Ethayarajh et al., 2024, arXiv:2402.01306): answers labelled desirable or not, without pairs.

    Args:
        beta: how close to the reference the policy stays: the larger, the closer.
        desirable_weight: of the loss of desirable answers.
        undesirable_weight: of the loss of the others. The paper wants desirable_weight * number of desirable answers to
            be 1 to 4/3 times undesirable_weight * number of the others.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        ranges.positive("beta", self.beta)
        ranges.not_negative("desirable_weight", self.desirable_weight)
        ranges.not_negative("undesirable_weight", self.undesirable_weight)

    def __call__(self, log_ratios: Tensor, labels: Tensor, reference_point: float) -> Tensor:
        """The loss [B].

        Args:
            log_ratios: [B] sums of logps - ref_logps of the answers.
            labels: [B] bool, True on desirable ones.
            reference_point: z.
        """
        return losses.kto(
            log_ratios,
            labels,
            reference_point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    def rewards(self, log_ratios: Tensor) -> Tensor:
        return self.beta * log_ratios
