from jsonargparse import ArgumentParser

from rl2lightning.suggest import shorten, suggest


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
