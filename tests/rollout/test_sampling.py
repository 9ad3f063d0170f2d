import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rl2lightning.rollout.sampling import _mix, draw, processed_logps, uniforms


def test_mix_is_splitmix64():
    # the first outputs of splitmix64 from state 0 are the mixes of 1, 2 and 3 times the golden constant
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([_signed(golden * i) for i in (1, 2, 3)])
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _mix(states).tolist() == [_signed(x) for x in expected]


def _signed(x: int) -> int:
    x %= 1 << 64
    return x - (1 << 64) if x >> 63 else x


def test_uniforms_are_a_function_of_seed_and_position_alone():
    seeds, positions = torch.tensor([3, 1 << 62, 3]), torch.tensor([5, 0, 6])
    together = uniforms(seeds, positions)
    alone = [uniforms(s[None], p[None]).item() for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_uniforms_of_neighbouring_seeds_and_positions_fill_the_unit_interval_evenly():
    seeds, positions = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    u = uniforms(seeds.flatten(), positions.flatten())
    assert u.unique().numel() == u.numel()
    assert u.min() >= 0
    assert (u * 2.0**52).frac().eq(0).all()  # a coarser grid than float64's own, for the sake of `draw`
    counts = torch.histc(u.float(), bins=20, min=0, max=1)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5  # five standard deviations
    grid = u.view(200, 200)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.03


def test_draw_inverts_the_cdf():
    logps = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert draw(logps, u).tolist() == [0, 0, 2, 2, 3]


def test_draw_never_takes_a_token_of_probability_zero():
    edge = 1 - 2.0**-52  # the largest of `uniforms`
    u = torch.tensor([0.0, edge], dtype=torch.float64)
    inf = torch.inf
    for row in ([-inf, 0.0, -inf], [-inf, -0.6931472, -inf, -0.6931472, -inf], [-inf, -30.0, -1e-13, -inf]):
        tokens = draw(torch.tensor(row).expand(2, -1), u)
        assert torch.tensor(row)[tokens].isfinite().all()
    torch.manual_seed(0)
    logps = (torch.randn(100, 1000) * 8).log_softmax(-1)
    logps[:, 500:] = -inf  # sums to less than 1 now: the draw normalises
    assert draw(logps, torch.full((100,), edge, dtype=torch.float64)).max() < 500


WARPERS = {"top_p": TopPLogitsWarper, "top_k": TopKLogitsWarper, "min_p": MinPLogitsWarper}


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.7), ("top_k", 5), ("min_p", 0.1), ("top_p", 1e-6)])
def test_truncated_distributions_are_those_of_hugging_face(name, value):
    torch.manual_seed(0)
    logits = torch.randn(20, 50) * 3
    settings = {"top_p": torch.ones(20), "top_k": torch.zeros(20, dtype=torch.long), "min_p": torch.zeros(20)}
    settings[name][:] = value
    logps = processed_logps(logits, torch.full((20,), 0.8), **settings)
    expected = WARPERS[name](value)(torch.tensor([[0]]), logits / 0.8).log_softmax(-1)
    torch.testing.assert_close(logps, expected)
    assert (logps == -torch.inf).any()


def test_rows_are_truncated_by_their_own_settings():
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).expand(4, 4)
    logps = processed_logps(
        logits,
        torch.tensor([1.0, 1.0, 0.5, 0.0]),
        top_p=torch.tensor([1.0, 0.5, 1.0, 1.0]),
        top_k=torch.tensor([2, 0, 0, 0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0]),
    )
    assert logps.isfinite().sum(-1).tolist() == [2, 1, 4, 4]
    # two tokens a logit apart: 1 / (1 + 1 / e)
    assert logps[0, 0].exp().item() == pytest.approx(0.7310586)
    torch.testing.assert_close(logps[2], (logits[2] * 2).log_softmax(-1))
    torch.testing.assert_close(logps[3], logits[3].log_softmax(-1))


def test_min_p_then_top_k_then_top_p():
    # min_p 0.2 drops what is below 0.1; top_k 2 leaves 2/3 and 1/3; of these top_p 0.6 needs the first only
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]).log()
    top_p, top_k, min_p = torch.tensor([0.6]), torch.tensor([2]), torch.tensor([0.2])
    logps = processed_logps(logits, torch.ones(1), top_p=top_p, top_k=top_k, min_p=min_p)
    assert logps.exp().tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
