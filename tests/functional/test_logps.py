import math
import threading

import pytest
import torch
from torch.autograd import gradcheck

from rl2lightning.functional.logps import VocabShard, default_chunk_size, token_logps


def full(hidden, weight, targets, *, temperature=1.0, softcap=None, bias=None):
    """The same from the full logits."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def sample(n=7, width=5, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (n,), generator=generator)
    return hidden, weight, bias, targets


class Threads:
    """What processes do to each other, for threads."""

    def __init__(self, size):
        self.size, self.barrier, self.slots = size, threading.Barrier(size), [None] * size
        self.collectives = 0

    def exchange(self, rank, x):
        self.slots[rank] = x.clone()
        self.barrier.wait(timeout=20)
        out = torch.stack(list(self.slots))
        self.collectives += rank == 0
        self.barrier.wait(timeout=20)
        return out

    def run(self, f):
        """[f(0), f(1), ...], each in a thread of its own."""
        out = [None] * self.size

        def call(rank):
            try:
                out[rank] = f(rank)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return out


class ThreadShard(VocabShard):
    def __init__(self, threads, rank, offset):
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "threads", threads)
        object.__setattr__(self, "rank", rank)

    def gather(self, x):
        return self.threads.exchange(self.rank, x)

    def add_up(self, x):
        x.copy_(self.threads.exchange(self.rank, x).sum(0))


def test_uniform_logits_give_minus_log_v_and_entropy_log_v():
    logps, entropy = token_logps(torch.zeros(2, 3), torch.randn(8, 3), torch.tensor([0, 7]), entropy=True)
    torch.testing.assert_close(logps, torch.full((2,), -math.log(8)))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(8)))


def test_two_words_by_hand():
    # logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4; at temperature 1/2: 1/10 and 9/10
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logps, entropy = token_logps(hidden, weight, torch.tensor([1]), entropy=True)
    torch.testing.assert_close(logps, torch.tensor([math.log(3 / 4)]))
    torch.testing.assert_close(entropy, torch.tensor([0.25 * math.log(4) + 0.75 * math.log(4 / 3)]))
    sharp, _ = token_logps(hidden, weight, torch.tensor([1]), temperature=0.5)
    torch.testing.assert_close(sharp, torch.tensor([math.log(9 / 10)]))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"softcap": 2.0, "temperature": 1.3}])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_values_and_gradients_are_those_of_the_full_logits(options, with_bias, chunk_size):
    hidden, weight, bias, targets = sample()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    for x in inputs:
        x.requires_grad_()
    options = options | ({"bias": bias} if with_bias else {})
    ours = token_logps(hidden, weight, targets, chunk_size=chunk_size, entropy=True, **options)
    theirs = full(hidden, weight, targets, **options)
    weights = torch.linspace(-1, 2, len(targets), dtype=hidden.dtype)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    loss = [(logps * weights).sum() + (entropy * weights.flip(0)).sum() for logps, entropy in (ours, theirs)]
    for a, b in zip(torch.autograd.grad(loss[0], inputs), torch.autograd.grad(loss[1], inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(entropy):
    hidden, weight, bias, targets = sample()

    def f(hidden, weight, bias):
        logps, entropies = token_logps(
            hidden, weight, targets, temperature=0.8, chunk_size=3, entropy=entropy, softcap=3.0, bias=bias
        )
        return (logps, entropies) if entropy else logps

    assert gradcheck(f, [x.requires_grad_() for x in (hidden, weight, bias)])


@pytest.mark.parametrize("output", [0, 1])
def test_the_gradient_of_one_output_alone(output):
    hidden, weight, _, targets = sample()
    hidden.requires_grad_()
    weight.requires_grad_()
    ours = token_logps(hidden, weight, targets, chunk_size=2, entropy=True)[output].sum()
    theirs = full(hidden, weight, targets)[output].sum()
    for a, b in zip(
        torch.autograd.grad(ours, [hidden, weight]), torch.autograd.grad(theirs, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_requires_a_gradient_gets_one(trained):
    inputs = list(sample())
    inputs[trained].requires_grad_()
    hidden, weight, _, targets = inputs
    token_logps(hidden, weight, targets)[0].sum().backward()
    (expected,) = torch.autograd.grad(full(hidden, weight, targets)[0].sum(), [inputs[trained]])
    torch.testing.assert_close(inputs[trained].grad, expected)
    assert inputs[1 - trained].grad is None


def test_no_tokens_still_reach_the_weight_with_a_zero_gradient():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    logps, entropy = token_logps(hidden, weight, torch.zeros(0, dtype=torch.long), entropy=True)
    assert logps.shape == entropy.shape == (0,)
    (logps.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scoring_without_gradients_gives_the_same_numbers(mode):
    hidden, weight, _, targets = sample()
    weight.requires_grad_()
    expected, _ = token_logps(hidden, weight, targets)
    with mode():
        scored, entropy = token_logps(hidden, weight, targets)
    assert not scored.requires_grad
    assert entropy is None
    assert torch.equal(scored, expected)


def test_nothing_as_large_as_the_logits_is_kept_or_made():
    n, vocab, chunk = 64, 512, 8
    hidden, weight, _, targets = sample(n, 4, vocab, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    saved, largest = [], 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        logps, entropy = token_logps(hidden, weight, targets, chunk_size=chunk, entropy=True)
        (logps.sum() + entropy.sum()).backward()
    assert saved
    assert max(saved) == weight.numel()
    assert chunk * vocab <= largest < n * vocab


def test_the_weight_gradient_of_many_bf16_chunks_is_rounded_once():
    # naive: the same chunks, each product and the running sum in bf16
    n, chunk = 2048, 16
    hidden, weight, _, targets = sample(n, 8, 16, torch.bfloat16)
    weight.requires_grad_()
    (ours,) = torch.autograd.grad(token_logps(hidden, weight, targets, chunk_size=chunk)[0].sum(), [weight])
    wide = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(full(hidden.double(), wide, targets)[0].sum(), [wide])
    naive = torch.zeros_like(weight)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        (piece,) = torch.autograd.grad(full(hidden[part], weight, targets[part])[0].sum(), [weight])
        naive += piece
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).norm() < 0.3 * (naive.double() - exact).norm()


def test_the_weight_gradient_does_not_depend_on_the_chunk_size_in_bf16():
    # were a chunk's product rounded to bf16 before it is added, the gap would be about 1e-3
    hidden, weight, _, targets = sample(512, 8, 16, torch.bfloat16)
    master = weight.float().requires_grad_()
    one, many = (
        torch.autograd.grad(token_logps(hidden, master, targets, chunk_size=size)[0].sum(), [master])[0]
        for size in (512, 16)
    )
    assert (one - many).norm() < 1e-5 * one.norm()


def test_a_float32_weight_is_used_and_trained_under_bf16_hidden_states():
    hidden, weight, _, targets = sample(32, 8, 16, torch.bfloat16)
    master = weight.float().requires_grad_()
    logps, _ = token_logps(hidden, master, targets, chunk_size=5)
    assert logps.dtype == torch.float32
    assert torch.equal(logps, token_logps(hidden, weight, targets, chunk_size=5)[0])
    logps.sum().backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32


def test_autocast_changes_neither_values_nor_gradients():
    hidden, weight, _, targets = sample(dtype=torch.float32)
    weight.requires_grad_()
    plain, _ = token_logps(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = token_logps(hidden, weight, targets)
        (cast_grad,) = torch.autograd.grad(cast.sum(), [weight])
    (plain_grad,) = torch.autograd.grad(plain.sum(), [weight])
    assert torch.equal(plain, cast)
    assert torch.equal(plain_grad, cast_grad)


def test_the_chunk_size_follows_the_memory_budget():
    assert default_chunk_size(2**20) == 128
    assert default_chunk_size(152_000) == 768  # 883 rounded down to a multiple of 128
    assert default_chunk_size(2**30) == 1


def test_a_temperature_of_zero_is_refused():
    hidden, weight, _, targets = sample()
    with pytest.raises(ValueError, match="temperature=0"):
        token_logps(hidden, weight, targets, temperature=0)


# ---- a vocabulary cut over processes


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [2, 4])  # 11 words: 6 + 5, or 3 + 3 + 3 + 2
def test_processes_with_a_part_of_the_words_each_find_what_one_with_all_does(size, with_entropy, with_bias, options):
    hidden, weight, bias, targets = sample(n=9)
    targets[:2] = torch.tensor([0, 10])  # the first and the last word
    weights = torch.linspace(-1, 2, len(targets), dtype=hidden.dtype)

    def outcome(f, hidden, weight, bias):
        inputs = [x.clone().requires_grad_() for x in ((hidden, weight, bias) if with_bias else (hidden, weight))]
        logps, entropy = f(inputs[0], inputs[1], inputs[2] if with_bias else None)
        loss = (logps * weights).sum() + ((entropy * weights.flip(0)).sum() if with_entropy else 0)
        loss.backward()
        return [logps.detach(), *([entropy.detach()] if with_entropy else [])], [x.grad for x in inputs]

    expected, gradients = outcome(lambda h, w, b: full(h, w, targets, bias=b, **options), hidden, weight, bias)
    threads, per_process = Threads(size), -(-11 // size)

    def process(rank):
        words = slice(rank * per_process, (rank + 1) * per_process)
        shard = ThreadShard(threads, rank, words.start)
        return outcome(
            lambda h, w, b: token_logps(
                h, w, targets, bias=b, chunk_size=2, entropy=with_entropy, shard=shard, **options
            ),
            hidden, weight[words], bias[words],
        )  # fmt: skip

    found = threads.run(process)
    assert threads.collectives == 2  # one forward, one backward, however many chunks
    for outputs, (grad_hidden, *_) in found:
        for a, b in zip(outputs, expected, strict=False):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(grad_hidden, gradients[0])
    for i in range(1, len(gradients)):
        torch.testing.assert_close(torch.cat([grads[i] for _, grads in found]), gradients[i])


def test_words_of_very_different_likelihood_on_different_processes_neither_overflow_nor_vanish():
    # the second process's logits are 200 above the first's: exp(200) is no float32
    hidden, targets = torch.ones(2, 1), torch.tensor([0, 2])
    weight = torch.tensor([[0.0], [0.0], [200.0], [200.0]])
    threads = Threads(2)
    found = threads.run(
        lambda rank: token_logps(
            hidden, weight[2 * rank :][:2], targets, entropy=True, shard=ThreadShard(threads, rank, 2 * rank)
        )
    )
    for logps, entropy in found:
        torch.testing.assert_close(logps, torch.tensor([-200 - math.log(2), -math.log(2)]))
        torch.testing.assert_close(entropy, torch.full((2,), math.log(2)))


def test_no_tokens_need_no_collective():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    threads = Threads(2)  # which one alone would wait for
    logps, _ = token_logps(hidden, weight, torch.zeros(0, dtype=torch.long), shard=ThreadShard(threads, 0, 0))
    logps.sum().backward()
    assert weight.grad is not None
    assert threads.collectives == 0


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_on_a_gpu_bf16_values_and_gradients_are_within_rounding_of_float64(fuse, entropy):
    hidden, weight, _, targets = (x.cuda() for x in sample(300, 64, 1000, torch.bfloat16))
    weight = weight / 8
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours = token_logps(*inputs, targets, chunk_size=37, entropy=entropy, fuse=fuse, temperature=0.9)
    theirs = full(*wide, targets, temperature=0.9)

    def total(outputs):
        return outputs[0].sum() + (outputs[1].sum() if entropy else 0)

    pairs = [*zip(ours, theirs, strict=True)][: 1 + entropy]
    pairs += zip(torch.autograd.grad(total(ours), inputs), torch.autograd.grad(total(theirs), wide), strict=True)
    for a, b in pairs:
        assert (a.double() - b).norm() < 0.004 * b.norm()
