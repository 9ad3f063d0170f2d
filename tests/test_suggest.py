from jsonargparse import ArgumentParser

from rl2lightning.preference_losses import PreferenceLoss, Sigmoid
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
