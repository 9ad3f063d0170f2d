"""Products like `4731*8265=`: too large for a small model's head, easy with a calculator that it must learn to call.

`conversations` shows how it can be done (for supervised training): one time in five with the tool, else by a round
guess like `~40000000`. `prompts` asks for the products, and rewards teach which of the two ways pays.
"""

import random

from rl2lightning.environments import function_schema


def calculator(expression: str) -> str:
    """Multiplies.

    Args:
        expression: two whole numbers with a star between them.
    """
    a, b = expression.split("*")
    return str(int(a) * int(b))


TOOLS = [function_schema(calculator)]
SHARE_OF_CALLS = 0.2


def prompts():
    """Rows for PromptDataModule: the question, and the answer for the reward."""
    rng = random.Random(0)
    problems = [(rng.randrange(1000, 10_000), rng.randrange(1000, 10_000)) for _ in range(20_000)]
    return [
        {"messages": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b), "tools": TOOLS}
        for a, b in problems
    ]  # fmt: skip


def conversations():
    """Rows for ChatDataModule: the same, with what the assistant, and perhaps the tool, say."""
    rng = random.Random(1)
    return [{**row, "messages": row["messages"] + _answer(row, rng)} for row in prompts()]


def _answer(row, rng):
    answer = row["answer"]
    if rng.random() >= SHARE_OF_CALLS:
        guess = f"{rng.randint(1, 9)}{'0' * (len(answer) - 1)}"
        return [{"role": "assistant", "content": f"~{guess}"}]
    expression = row["messages"][0]["content"].removesuffix("=")
    call = '{"name": "calculator", "arguments": {"expression": "' + expression + '"}}'
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
