import pytest
from jsonargparse import ArgumentParser

from rl2lightning.algorithms.base import PostTrainingModule
from rl2lightning.algorithms.ppo import PPO  # noqa: F401 - it is known once it is loaded
from rl2lightning.models.lora import LoRAConfig
from rl2lightning.preference_losses import IPO, PreferenceLoss, Sigmoid, SimPO
from rl2lightning.suggest import shorten, suggest
from rl2lightning.types import SamplingParams


def parser() -> ArgumentParser:
    made = ArgumentParser()
    for name in ("trainer.max_steps", "trainer.max_epochs", "trainer.callbacks", "seed", "sampling.max_tokens"):
        made.add_argument(f"--{name}")
    return made


def test_the_closest_key_of_the_same_group_is_named() -> None:
    assert suggest("Option 'trainer.max_step' is not accepted", parser()) == (
        "Option 'trainer.max_step' is not accepted; did you mean 'trainer.max_steps'?"
    )
    # `max_tokens` is as close, but not in that group
    assert "'trainer.max_epochs'" in suggest("Group 'trainer' does not accept option 'max_epok'", parser())
    assert "'sampling.max_tokens'" in suggest("Group 'sampling' does not accept option 'max_token'", parser())


def test_a_misspelt_group_is_named_without_what_is_in_it() -> None:
    message = "unrecognized arguments: --trainr.max_steps=3"
    assert suggest(message, parser()) == f"{message}; did you mean 'trainer'?"


def test_a_key_at_the_wrong_place_is_found_at_the_right_one() -> None:
    assert "did you mean 'trainer.max_steps'?" in suggest("Option 'max_steps' is not accepted", parser())


def test_the_value_of_an_unknown_argument_stands_before_the_suggestion() -> None:
    message = "unrecognized arguments: --trainer.max_step 3"
    assert suggest(message, parser()) == f"{message}; did you mean 'trainer.max_steps'?"


def test_a_key_spelt_right_at_the_wrong_place_comes_before_one_that_resembles_it() -> None:
    made = parser()
    made.add_argument("--trainer.max_token")
    assert "did you mean 'sampling.max_tokens'?" in suggest("Option 'trainer.max_tokens' is not accepted", made)


def test_a_setting_of_a_class_that_may_be_chosen_is_found_in_it() -> None:
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss, default=Sigmoid())
    made.add_argument("--eval_sampling", type=SamplingParams | None)
    for key, meant in {
        "beta": "preference_loss.beta",  # of Sigmoid
        "bta": "preference_loss.beta",
        "gamma": "preference_loss.gamma",  # of SimPO
        "temperature": "eval_sampling.temperature",
    }.items():
        assert suggest(f"Option '{key}' is not accepted", made).endswith(f"; did you mean '{meant}'?"), key


def test_help_of_a_class_within_another_says_how_it_is_had() -> None:
    message = "unrecognized arguments: --policy_loss.help=GSPO"
    assert suggest(message, parser()).endswith("as in --model.help GRPO --model.policy_loss.help GSPO?")


def test_init_args_are_a_key_too() -> None:
    assert "did you mean 'init_args'?" in suggest("Option 'init_arg.lr' is not accepted", parser())


def test_a_key_that_resembles_nothing_gets_no_suggestion() -> None:
    for message in (
        "Option 'zzz' is not accepted",
        "Expected a <class 'int'>. Got value: eight",
        'Parser key "seeed":',
    ):
        assert suggest(message, parser()) == message


def test_what_an_inner_parser_suggested_stays() -> None:
    message = "Option 'seeed' is not accepted; did you mean 'seed_of_the_class'?"
    assert suggest(message, parser()) == message


def test_classes_are_found_in_the_module_named_or_by_their_short_name() -> None:
    assert "did you mean 'GRPO'?" in suggest("module 'rl2lightning' has no attribute 'GRP0'", parser())
    assert "did you mean 'estimators'?" in suggest("module 'rl2lightning' has no attribute 'estimator'", parser())
    import rl2lightning.policy_losses  # noqa: F401 - what is loaded is known

    assert "did you mean 'PPOClip'?" in suggest("Expected a dot import path string: PPOClipp", parser())


UNION = """Parser key "trainer.callbacks":
  Does not validate against any of the Union subtypes
  Subtypes: [list[Callback], <class 'Callback'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'rl2lightning.RolloutCallback':
        {line}
    - Not a valid subclass of Callback
    - Expected a <class 'NoneType'>
  Given value type: <class 'list'>
  Given value: [1, 2, 3]"""


def test_of_a_union_s_report_the_telling_line_is_left_with_its_class() -> None:
    line = "Option 'maxturns' is not accepted; did you mean 'max_turns'?"
    assert shorten(UNION.format(line=line)) == f"rl2lightning.RolloutCallback: {line}"
    line = "Parser key \"max_turns\":\n          Expected a <class 'int'>. Got value: two"
    assert shorten(UNION.format(line=line)) == (
        "rl2lightning.RolloutCallback: max_turns: Expected a <class 'int'>. Got value: two"
    )


def test_what_a_constructor_raised_is_left() -> None:
    message = """Does not validate against any of the Union subtypes
Subtypes: [<class 'Module'>, <class 'NoneType'>]
Errors:
  - kl.coef=-1.0 must not be negative
  - Expected a <class 'NoneType'>
Given value: Namespace()"""
    assert shorten(message) == "kl.coef=-1.0 must not be negative"


def test_other_messages_stay_as_they_are() -> None:
    for message in ("data file 'x' does not exist", "two\nlines", UNION.format(line="Something new")[:60]):
        assert shorten(message) == message


def refused_by(class_path: str, key: str, line: str) -> str:
    return f"Parser key \"{key}\":\n  Problem with given class_path '{class_path}':\n    {line}"


def test_a_key_that_the_chosen_class_refused_is_not_suggested_because_a_class_beside_it_has_it() -> None:
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss, default=Sigmoid())
    refused = "Option 'length_normalised' is not accepted"  # by SimPO; MarginLoss has it
    message = refused_by("rl2lightning.preference_losses.SimPO", "preference_loss", refused)
    assert suggest(message, made) == f"{message}; it takes per_token_beta, gamma, nll_coef"
    assert suggest(refused, made).endswith("did you mean 'preference_loss.length_normalised'?")  # nothing is chosen yet


@pytest.mark.parametrize("loss", [SimPO, IPO])
def test_a_setting_with_a_longer_name_in_the_chosen_class_comes_before_any_elsewhere(loss: type) -> None:
    refused = "Option 'beta' is not accepted"
    of_the_class = ArgumentParser()
    of_the_class.add_class_arguments(loss)
    assert suggest(refused, of_the_class) == f"{refused}; did you mean 'per_token_beta'?"


def test_a_key_elsewhere_that_only_resembles_what_the_chosen_class_refused_is_not_suggested() -> None:
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss, default=Sigmoid())
    made.add_argument("--optimizer.betas")
    message = refused_by("rl2lightning.preference_losses.ORPO", "preference_loss", "Option 'beta' is not accepted")
    assert suggest(message, made) == f"{message}; it takes lam"


def test_the_parser_around_a_class_finds_a_key_that_stands_elsewhere() -> None:
    message = refused_by(
        "rl2lightning.preference_losses.SimPO", "preference_loss", "Option 'max_steps' is not accepted"
    )
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss, default=Sigmoid())
    assert suggest(message, made) == f"{message}; did you mean 'trainer.max_steps'?"


def test_of_a_class_with_many_settings_it_says_how_they_are_listed() -> None:
    made = ArgumentParser()
    made.add_argument("--model", type=PostTrainingModule)
    message = refused_by("rl2lightning.algorithms.ppo.PPO", "model", "Option 'blurb' is not accepted")
    assert suggest(message, made) == f"{message}; it takes what --model.help PPO lists"


def test_what_a_setting_is_called_elsewhere_leads_to_the_one_here() -> None:
    made = ArgumentParser()
    for name in ("messages_key", "epochs"):
        made.add_argument(f"--{name}")
    assert suggest("Option 'prompt_key' is not accepted", made).endswith("; did you mean 'messages_key'?")
    refused = "Option 'updates_per_rollout' is not accepted"
    assert suggest(refused, made) == refused  # both of what it stands for must be there
    made.add_argument("--mini_batches")
    assert suggest(refused, made).endswith("; did you mean 'epochs' and 'mini_batches'?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RPO", "; did you mean 'Sigmoid' with nll_coef 1?"),
        ("DPO", "; did you mean 'Sigmoid'?"),
        ("simpo", "; did you mean 'SimPO'?"),
    ],
)
def test_a_class_that_is_none_of_those_expected_is_answered_with_those(name: str, said: str) -> None:
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss | None)
    message = suggest(f'Parser key "preference_loss":\n  Expected a dot import path string: {name}', made)
    assert f"'{name}' is no known PreferenceLoss{said}" in message


@pytest.mark.parametrize("name", ["KTO", "Foo"])
def test_a_class_that_resembles_none_of_those_expected_is_answered_with_a_list(name: str) -> None:
    made = parser()
    made.add_argument("--preference_loss", type=PreferenceLoss)

    class OfOnesOwn(Sigmoid):  # which does not take its base off the list
        pass

    message = suggest(f'Parser key "preference_loss":\n  Expected a dot import path string: {name}', made)
    refused, known, own = message.splitlines()[1].split("; ")
    assert refused == f"  '{name}' is no known PreferenceLoss"
    named = known.removeprefix("known are ").split(", ")
    assert {"Hinge", "IPO", "ORPO", "Robust", "Sigmoid", "SimPO", "OfOnesOwn"} <= set(named)
    assert "MarginLoss" not in named  # abstract
    assert own == "a class of your own goes with its module, as in my_module.MyClass"


def test_a_refused_class_name_stays_in_the_one_line() -> None:
    line = 'Parser key "preference_loss":\n          {}'
    for refused in ("'Foo' is no known PreferenceLoss; known are Hinge, IPO", "Expected a dot import path string: Foo"):
        shown = shorten(UNION.format(line=line.format(refused)))
        assert shown == f"rl2lightning.RolloutCallback: preference_loss: {refused}"


def test_a_class_name_is_never_answered_with_itself() -> None:
    message = "Expected a dot import path string: Sigmoid"
    assert "'Sigmoid'" not in suggest(message, parser())


@pytest.mark.parametrize(
    "errors",
    [
        "    - Expected a dot import path string: true\n    - Expected a <class 'NoneType'>. Got value: True\n",
        "    - Not a valid subclass of LoRAConfig\n      Subclass types expect one of:\n      - a class path (str)\n",
    ],
)
def test_true_in_the_place_of_settings_is_answered_with_one_of_them(errors: str) -> None:
    made = ArgumentParser()
    made.add_argument("--lora", type=LoRAConfig | None)
    inner = suggest(f'Parser key "lora":\n  Errors:\n{errors}  Given value type: <class>\n  Given value: true', made)
    assert shorten(inner).endswith("'true' is no LoRAConfig: give its settings, as in --lora.rank 16")
    outer = suggest(f'Parser key "model":\n  {inner}', ArgumentParser())
    assert shorten(outer).endswith("'true' is no LoRAConfig: give its settings, as in --model.lora.rank 16")
