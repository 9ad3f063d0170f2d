import sys

import pytest

from rl2lightning.usercode import by_name, load_file, load_function


def test_a_file_is_run_by_itself_and_sys_path_stays(tmp_path):
    (tmp_path / "helper.py").write_text("raise AssertionError('found by name')")
    file = tmp_path / "script.py"
    file.write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int = 3\nanswer = Point().x * 14\n"
    )
    before = list(sys.path)
    module = load_file(str(file), setting="x")
    assert module.answer == 42
    assert sys.path == before
    file.write_text("import helper")
    with pytest.raises(ValueError, match="ModuleNotFoundError: No module named 'helper'"):
        load_file(str(file), setting="x")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "env.py").write_text(f"value = '{name}'\ndef f():\n    return value\n")
    f, g = (load_function(f"{tmp_path}/{name}/env.py:f", setting="x") for name in ("a", "b"))
    assert (f(), g()) == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "setting='.*gone.py': no such file"),
        ("1 / 0", "could not be imported: ZeroDivisionError: division by zero"),
        ("def f(:", "could not be imported: SyntaxError"),
        ("def other(): ...\nf = 3", "no function 'f' there, only: other"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, message):
    file = tmp_path / ("gone.py" if content is None else "script.py")
    if content is not None:
        file.write_text(content)
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        load_function(f"{file}:f", setting="setting")
    if content is not None and "f = 3" not in content:
        assert set(sys.modules) == modules  # a half-imported module does not stay


def test_a_function_is_found_by_its_import_path():
    import math

    assert load_function("math.sqrt", setting="x") is math.sqrt
    with pytest.raises(ValueError, match="x='no.such.thing' could not be imported: ModuleNotFoundError"):
        load_function("no.such.thing", setting="x")
    with pytest.raises(ValueError, match="no function 'cube_root' there"):
        load_function("math.cube_root", setting="x")
    with pytest.raises(ValueError, match="must be 'package.module.function' or 'path/file.py:function'"):
        load_function("sqrt", setting="x")


def test_parameters_are_filled_by_name_from_what_is_given_then_from_the_row():
    def function(messages, answer, difficulty=5):
        return messages, answer, difficulty

    call = by_name(function, given=("messages",), setting="x")
    assert call({"answer": 1, "messages": "the row's", "other": 2}, messages="given") == ("given", 1, 5)
    assert call({"answer": 1, "difficulty": 7}, messages="given") == ("given", 1, 7)
    with pytest.raises(ValueError, match="x function wants the column 'answer', the row has only: question"):
        call({"question": 1}, messages="given")


def test_double_star_takes_the_rest_of_the_row():
    def function(answer, **columns):
        return answer, columns

    call = by_name(function, given=("messages",), setting="x")
    assert call({"answer": 1, "a": 2, "b": 3, "messages": 4}, messages=5) == (1, {"a": 2, "b": 3})


def test_functions_that_cannot_be_called_by_name_are_refused():
    async def coroutine(messages): ...

    with pytest.raises(ValueError, match="coroutine is a coroutine function"):
        by_name(coroutine, given=("messages",), setting="x")
    with pytest.raises(ValueError, match="'args' cannot be given by name"):
        by_name(lambda *args: 0, given=("messages",), setting="x")
    with pytest.raises(ValueError, match="'a' cannot be given by name"):
        by_name(lambda a, /: 0, given=("messages",), setting="x")
