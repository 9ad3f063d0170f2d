from rl2lightning.environments.base import Environment, StepResult


def test_an_environment_of_one_method_starts_from_the_row_and_offers_nothing():
    class Silent(Environment):
        def step(self, messages, row):
            return StepResult()

    environment = Silent()
    messages = [{"role": "user", "content": "hi"}]
    assert environment.reset({"messages": messages}) == messages
    assert (environment.tools, environment.rewards) == (None, {})


def test_an_empty_step_says_nothing_and_gives_nothing():
    assert (StepResult().messages, StepResult().reward, StepResult().done) == ([], 0.0, False)
