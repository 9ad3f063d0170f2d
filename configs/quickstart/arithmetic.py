"""Additions like `37+58=` -> `95`: a data set small enough to learn from nothing, on a laptop, in a minute or two.

`conversations` shows the answers (for supervised training), `pairs` sets a wrong one against each and `labelled` says
of an answer whether it is right (for preferences), `prompts` asks for them and `reward_fn` marks what comes back (for
reinforcement learning). All list the same 10,000 problems in the same order, so that the same `split_seed` and
`val_ratio` hold out the same ones. `mixed` and `held_out` are `prompts` cut in two at just that place, the first with
sums of three digits in between; so are `near_misses` and `held_out_near_misses`, harder pairs.
"""

import random

import torch

PROBLEMS = [(a, b) for a in range(100) for b in range(100)]


def prompts():
    """Rows for PromptDataModule: the question, and the answer for the reward."""
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
        for a, b in PROBLEMS
    ]  # fmt: skip


def conversations():
    """Rows for ChatDataModule: the same, with the answer as the assistant's turn."""
    return [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}
        for row in prompts()
    ]  # fmt: skip


def pairs():
    """Rows for PreferenceDataModule: the right answer, and a number that is not."""
    rng = random.Random(0)
    return [
        {**row, "chosen": row["answer"], "rejected": _wrong(row["answer"], rng)}
        for row in prompts()
    ]  # fmt: skip


def near_misses():
    """Pairs of the problems that are not held out, eight of each, as `pairs` and with wrong answers close by."""
    held = set(_held_out())
    return _with_near_misses([row for i, row in enumerate(prompts()) if i not in held] * 8, random.Random(3))


def held_out_near_misses():
    """The same of the problems that are held out, one of each."""
    return _with_near_misses(held_out(), random.Random(4))


def _with_near_misses(rows, rng):
    """Three wrong answers in five are those of a model that nearly adds, and one lacks a digit.

    What a reward model has not been told of, a policy finds: of answers that stop early, or forget a carry, it would
    think well.
    """
    kinds = [_close, _close, _carried, _short, _wrong]
    return [{**row, "chosen": row["answer"], "rejected": rng.choice(kinds)(row["answer"], rng)} for row in rows]


def labelled():
    """Rows for UnpairedDataModule: one answer to each question, right or wrong, and which of the two it is."""
    rng = random.Random(1)
    rows = [(row, rng.random() < 0.5) for row in pairs()]
    return [
        {**row, "completion": row["chosen"] if right else row["rejected"], "label": right}
        for row, right in rows
    ]  # fmt: skip


def _wrong(answer, rng):
    """A digit of the answer is another, there is one more, or it is the answer to something else."""
    i, digit = rng.randrange(len(answer)), rng.choice("0123456789")
    a, b = rng.choice(PROBLEMS)
    wrong = rng.choice([answer[:i] + digit + answer[i + 1 :], answer[:i] + digit + answer[i:], str(a + b)])
    return wrong if wrong != answer else _wrong(answer, rng)


def _close(answer, rng):
    """A number that is one or two more or less."""
    return _off(answer, (-2, -1, 1, 2), rng)


def _carried(answer, rng):
    """A number that is about ten more or less, as where a carry is forgotten, or made up."""
    return _off(answer, (-11, -10, -9, 9, 10, 11), rng)


def _off(answer, offsets, rng):
    right = int(answer)
    return str(rng.choice([right + off for off in offsets if right + off >= 0]))


def _short(answer, rng):
    """A digit is missing."""
    i = rng.randrange(len(answer))
    return answer[:i] + answer[i + 1 :] if len(answer) > 1 else _wrong(answer, rng)


def mixed():
    """The prompts that are not held out, and as many that are out of reach: what is earned depends on the prompt."""
    rng, held = random.Random(2), set(_held_out())
    hard = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(len(PROBLEMS) - len(held))]
    return [row for i, row in enumerate(prompts()) if i not in held] + [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
        for a, b in hard
    ]  # fmt: skip


def held_out():
    """The prompts that `val_ratio: 0.05` holds out of the lists above."""
    rows = prompts()
    return [rows[i] for i in _held_out()]


def _held_out():
    return sorted(torch.randperm(len(PROBLEMS), generator=torch.Generator().manual_seed(0))[:500].tolist())


def reward_fn(messages, answer):
    """1 for exactly the right answer, 0 for anything else."""
    return float(messages[-1]["content"] == answer)
