from __future__ import annotations

from typing import Any, Literal

import pytest

from rl2lightning.environments.tool_schema import check_arguments, function_schema


def lookup(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    exact: bool | None = None,
    points: list[float] = (),
    extra: dict[str, int] | None = None,
) -> str:
    """Looks up the weather
    of a city.

    Args:
        city: its name,
            in English.
        days (int): how many.

    Returns:
        unit: not a parameter.
    """


def test_a_schema_is_made_of_annotations_defaults_and_docstring():
    assert function_schema(lookup) == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks up the weather\nof a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name, in English."},
                    "days": {"type": "integer", "description": "how many."},
                    "unit": {"enum": ["C", "F"]},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "points": {"type": "array", "items": {"type": "number"}},
                    "extra": {
                        "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_callable_objects_and_other_names_have_schemas_too():
    class Adder:
        """Adds."""

        def __call__(self, a: int) -> int:
            return a + 1

    function = function_schema(Adder(), name="plus_one")["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("plus_one", ["a"])


def no_type(x): ...
def no_name(*x: int): ...
def no_json(x: bytes): ...
def unknown(x: Unheard): ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_type, "parameter 'x' needs a type, such as x: str"),
        (no_name, "cannot be given by name"),
        (no_json, "bytes.*cannot write in JSON"),
        (unknown, "'Unheard' is not defined"),
    ],
)
def test_what_a_model_cannot_call_is_said_at_once(function, message):
    with pytest.raises(ValueError, match=f"tool '{function.__name__}'.*{message}"):
        function_schema(function)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"city": "Rome", "days": 2, "unit": "F", "exact": None, "points": [1, 2.5], "extra": {"a": 1}}, None),
        ({"city": "Rome"}, None),
        ({}, "missing argument 'city' (expected: city, days, unit, exact, points, extra)"),
        ({"city": "Rome", "town": 1}, "unknown argument 'town'"),
        ({"city": 3}, "argument 'city' must be a string, not 3"),
        ({"city": "Rome", "days": "2"}, "argument 'days' must be an integer, not '2'"),
        ({"city": "Rome", "days": True}, "must be an integer, not True"),
        ({"city": "Rome", "unit": "K"}, "must be one of 'C', 'F', not 'K'"),
        ({"city": "Rome", "exact": 1}, "must be a boolean or null, not 1"),
        ({"city": "Rome", "points": [1, "2"]}, "must be an array of numbers, not [1, '2']"),
        ({"city": "Rome", "extra": {"a": "1"}}, "argument 'extra' must be"),
        (["Rome"], "the arguments must be a JSON object, not ['Rome']"),
        (None, "the arguments must be a JSON object, not None"),
    ],
)
def test_arguments_are_checked_and_what_is_wrong_is_said(arguments: Any, wrong: str | None):
    found = check_arguments(function_schema(lookup), arguments)
    assert found is None if wrong is None else wrong in found


def test_a_long_argument_is_not_quoted_in_full():
    assert len(check_arguments(function_schema(lookup), {"city": ["x" * 10_000]})) < 150
