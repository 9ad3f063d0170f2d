"""What a program in the sandbox can and cannot do. Every one of these programs is run for real."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl2lightning.environments.python_exec import PythonTool, Sandbox, SandboxError, run_tests
from rl2lightning.environments.sandbox_launcher import enterable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def _full_isolation() -> bool:
    try:
        Sandbox()
    except ValueError:
        return False
    return True


FULL = _full_isolation()
ANYBODYS = shutil.which(
    "python3", path="/usr/bin:/usr/local/bin:/bin"
)  # one that every user can run, unlike ours perhaps
needs_full = pytest.mark.skipif(not FULL, reason="namespaces are refused here")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(isolation="full" if FULL else "partial", wall_seconds=20, workers=2)


@pytest.fixture(scope="module")
def hasty() -> Sandbox:
    return Sandbox(isolation="full" if FULL else "partial", wall_seconds=1.0, cpu_seconds=1, max_output=1000)


def processes(marker: str) -> list[int]:
    """Processes of this machine whose command line has the marker."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


# -- programs that do no harm -------------------------------------------------------------------------------------


def test_a_program_reads_stdin_writes_and_ends_with_its_code(sandbox):
    ran = sandbox.run("import sys; print(input()[::-1]); print('x', file=sys.stderr); sys.exit(3)", stdin="abc\n")
    assert (ran.status, ran.exit_code, ran.stdout, ran.stderr) == ("error", 3, "cba\n", "x\n")
    assert sandbox.run("print('ä')").stdout == "ä\n"


def test_a_program_has_its_files_and_this_python(sandbox):
    ran = sandbox.run("import torch, helper; print(helper.x)", files={"helper.py": "x = 5"})
    assert ran.stdout == "5\n" or "torch" in ran.stderr  # torch may want more than the memory
    assert sandbox.run("import helper; print(helper.x)", files={"helper.py": "x = 5"}).stdout == "5\n"
    with pytest.raises(ValueError, match="plain name without directories, not '../x'"):
        sandbox.run("", files={"../x": ""})


def test_programs_can_start_processes_and_write_files_within_limits(sandbox):
    ran = sandbox.run(
        "import subprocess, tempfile\n"
        "with tempfile.NamedTemporaryFile('w') as file: print(file.write('abc'))\n"
        "print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)"
    )
    assert (ran.status, ran.stdout) == ("ok", "3\nhi\n\n")


def test_programs_run_side_by_side_and_know_nothing_of_each_other(sandbox):
    code = "import os; open('x', 'a').write('1'); print(open('x').read(), os.getcwd())"
    with ThreadPoolExecutor(4) as pool:
        outputs = [ran.stdout for ran in pool.map(sandbox.run, [code] * 4)]
    assert all(output.startswith("1 ") for output in outputs)


# -- programs that do ---------------------------------------------------------------------------------------------


def test_a_fork_bomb_is_stopped_and_nothing_is_left_of_it(hasty):
    marker = f"bomb{os.getpid()}{time.time_ns()}"
    ran = hasty.run(
        f"import os, sys\nmarker = '{marker}'\nwhile True:\n"
        "    try:\n        os.fork()\n    except OSError:\n        pass"
    )
    assert ran.status == "timeout"
    assert ran.seconds < 15
    begin = time.monotonic()
    assert subprocess.run(["true"]).returncode == 0  # the machine can still start processes
    assert time.monotonic() - begin < 10
    assert not processes("main.py")


def test_processes_that_detach_themselves_end_with_the_program(sandbox):
    code = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            os.execvp('sleep', ['sleep', '4242'])\n"
        "        os._exit(0)\n"
        "time.sleep(0.3)\n"
        "print('parent is done')\n"
    )
    begin = time.monotonic()
    assert sandbox.run(code).stdout == "parent is done\n"
    assert time.monotonic() - begin < 15  # nobody waits for them
    assert not processes("sleep\0004242")


def test_memory_is_limited_for_a_process_and_for_all_together(sandbox):
    ran = sandbox.run("x = bytearray(10**10)")
    assert (ran.status, ran.exit_code) == ("error", 1)
    assert "MemoryError" in ran.stderr
    code = (
        "import os, time\n"
        "for _ in range(4):\n    if os.fork() == 0:\n        break\n"
        "x = bytearray(250 * 2**20)\n"
        "for i in range(0, len(x), 4096):\n    x[i] = 1\n"
        "time.sleep(20)\n"
    )
    assert sandbox.run(code).status == "memory"


@needs_full
def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)")
        assert ran.status == "error"
        assert "OSError" in ran.stderr or "ConnectionRefused" in ran.stderr
    ran = sandbox.run("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=5)")
    assert "Network is unreachable" in ran.stderr


def test_a_flood_of_files_and_a_large_file_meet_their_limits(sandbox):
    flood = sandbox.run("import time\nfor i in range(100_000):\n    open(f'f{i}', 'w').close()\n    time.sleep(1e-4)")
    large = sandbox.run("file = open('x', 'wb')\nwhile True:\n    file.write(bytes(10**6))")
    several = sandbox.run(
        "import time\nfor i in range(60):\n    open(f'f{i}', 'wb').write(bytes(10**6))\n    time.sleep(0.02)"
    )
    if FULL:  # a file system of its own is full
        assert "No space left" in flood.stderr
        assert "No space left" in large.stderr
        assert "No space left" in several.stderr
    else:  # one of ours is watched
        assert (flood.status, several.status) == ("files", "files")
        assert "File too large" in large.stderr


def test_endless_output_ends_the_program_and_is_cut(hasty):
    ran = hasty.run("while True: print('x' * 100)")
    assert ran.status == "output"
    assert len(ran.stdout) == 1000


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "input()\nimport os; os.read(0, 1)"]
)
def test_a_program_that_does_not_end_is_ended(hasty, code):
    ran = hasty.run(code, stdin="")
    assert ran.status == ("error" if "input" in code else "timeout")  # at once: stdin has an end
    assert ran.seconds < 10


def test_secrets_of_the_environment_stay_here(sandbox, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret-4711")
    ran = sandbox.run(
        "import os, glob\nprint(dict(os.environ))\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try:\n        print(path, open(path, 'rb').read())\n    except OSError as error:\n        print(error)"
    )
    assert ran.ok
    assert "4711" not in ran.stdout
    assert "'PATH'" in ran.stdout


@needs_full
def test_files_of_ours_are_not_there_and_nothing_else_can_be_written(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("4711")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    assert "FileNotFoundError" in sandbox.run(f"print(open('{secret}').read())").stderr
    assert "FileNotFoundError" in sandbox.run(f"print(open('{Path(__file__).resolve()}').read())").stderr
    assert "FileNotFoundError" in sandbox.run("print(open('/etc/passwd').read())").stderr
    for path in ("/usr/x", "/x", "/dev/x", sys.prefix + "/x"):
        assert "Error" in sandbox.run(f"open('{path}', 'w')").stderr
    visible = Sandbox(visible=[str(tmp_path)])
    assert visible.run(f"print(open('{secret}').read())").stdout == "4711\n"
    assert "Error" in visible.run(f"open('{secret}', 'w').write('x')").stderr
    assert secret.read_text() == "4711"


@needs_full
def test_a_program_cannot_win_rights_or_reach_other_processes(sandbox):
    ran = sandbox.run(
        "import ctypes, os\n"
        "print(os.getuid() > 0, [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 5])\n"
        "print(ctypes.CDLL(None).unshare(0x10000000))\n"  # a user namespace, in which it would be root
        f"for kill in (lambda: os.kill({os.getpid()}, 9), lambda: os.setuid(0), lambda: os.chroot('/')):\n"
        "    try:\n        kill(); print('done')\n    except OSError:\n        print('refused')\n"
    )
    assert ran.stdout == "True []\n-1\nrefused\nrefused\nrefused\n"


def test_nothing_is_left_in_the_temporary_directory(hasty, tmp_path, monkeypatch):
    before = set(Path("/tmp").glob("sandbox-*"))
    hasty.run("open('x', 'w').write('x')")
    hasty.run("while True: pass")
    assert set(Path("/tmp").glob("sandbox-*")) <= before


# -- isolation that is not to be had ------------------------------------------------------------------------------


@pytest.fixture
def refusing_launcher(tmp_path, monkeypatch):
    """The launcher on a system that refuses namespaces, as most containers do."""
    from rl2lightning.environments import python_exec

    source = Path(python_exec.__file__).with_name("sandbox_launcher.py").read_text()
    refused = source.replace("return libc.unshare(flags) == 0", "return False")
    assert refused != source
    (tmp_path / "sandbox_launcher.py").write_text(refused)
    monkeypatch.setattr(python_exec, "__file__", str(tmp_path / "python_exec.py"))


@pytest.mark.usefixtures("refusing_launcher")
def test_full_isolation_that_is_refused_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"cannot have.* a network of its own.*CAP_SYS_ADMIN.*isolation: partial"):
        Sandbox()


@pytest.mark.skipif(not ANYBODYS, reason="no Python that every user can run")
@pytest.mark.usefixtures("refusing_launcher")
def test_partial_isolation_says_what_is_missing_and_keeps_its_limits(caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        sandbox = Sandbox(isolation="partial", wall_seconds=10, max_files=20, python=ANYBODYS)
    assert "a network of its own (none): programs can reach yours" in caplog.text
    assert sandbox.run("print(1)").stdout == "1\n"
    assert sandbox.run("import time\nfor i in range(40):\n    open(f'{i}', 'w')\ntime.sleep(30)").status == "files"
    code = (
        "import os\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.execvp('sleep', ['sleep', '4243'])\n"
        "    os._exit(0)\nprint(os.getuid())"
    )
    uid = int(sandbox.run(code).stdout)
    assert uid > 0 if os.geteuid() == 0 else uid == os.geteuid()  # nobody's, where that is to be had
    deadline = time.monotonic() + 10
    while processes("sleep\0004243") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes("sleep\0004243")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not ANYBODYS, reason="takes root, to become another user"
)
def test_full_isolation_needs_no_root_where_user_namespaces_are_permitted(tmp_path):
    import json

    from rl2lightning.environments import python_exec

    launcher = tmp_path / "launcher.py"
    launcher.write_text(Path(python_exec.__file__).with_name("sandbox_launcher.py").read_text())
    os.chmod(launcher, 0o755)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/tmp") and directory.is_relative_to("/tmp"):
            os.chmod(directory, 0o755)
    settings = {
        "files": {"main.py": "import os; print(os.getuid(), os.listdir('.'))"},
        "stdin": "",
        "command": [ANYBODYS, "-B", "main.py"],
        "python": [],
        "visible": [],
        "required": [],
        "environment": {"PATH": os.defpath},
        "cpu_seconds": 5,
        "wall_seconds": 10.0,
        "memory_mb": 512,
        "disk_mb": 4,
        "max_files": 10,
        "max_processes": 8,
        "max_output": 1000,
    }
    as_nobody = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    done = subprocess.run(
        [*as_nobody, ANYBODYS, "-I", "-S", str(launcher)], input=json.dumps(settings), capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    if "user" in result["missing"]:
        pytest.skip("user namespaces are refused here")
    assert (result["missing"], result["stdout"]) == ([], "65534 ['main.py']\n")


def test_a_launcher_that_dies_is_an_error_of_the_sandbox(sandbox, monkeypatch, tmp_path):
    from rl2lightning.environments import python_exec

    (tmp_path / "sandbox_launcher.py").write_text("raise SystemExit('out of luck')")
    monkeypatch.setattr(python_exec, "__file__", str(tmp_path / "python_exec.py"))
    with pytest.raises(SandboxError, match="the sandbox failed: out of luck"):
        sandbox.run("")


@pytest.mark.parametrize("setting", ["wall_seconds", "memory_mb", "max_processes", "workers"])
def test_limits_are_positive(setting):
    with pytest.raises(ValueError, match=f"sandbox.init_args.{setting}=0 must be positive"):
        Sandbox(**{setting: 0})


# -- the tool, and tests of an answer -----------------------------------------------------------------------------


def test_the_tool_returns_what_was_printed_and_how_it_ended(sandbox, hasty):
    tool = PythonTool(sandbox)
    assert tool.name == "python"
    assert tool({"code": "print(6 * 7)"}) == "42\n"
    assert tool({"code": "x = 1"}) == "(no output; print what you want to see)"
    failed = tool({"code": "print('a')\n1 / 0"})
    assert failed.startswith("a\nTraceback")
    assert failed.endswith("ZeroDivisionError: division by zero\n(exit code 1)")
    assert PythonTool(hasty)({"code": "while True: pass"}) == "(it took too long and was stopped)"
    assert tool({"code": "print('\ud800')"}) == "?\n"


def test_a_solution_is_tested_test_by_test(sandbox):
    tests = ["assert f(2) == 4", "assert f(3) == 9", "import math\nassert f(0) == 0", "assert g(1)"]
    result = run_tests(sandbox, "def f(x):\n    return x * x\nprint('noise')", tests)
    assert (result.passed, result.total, result.share) == (3, 4, 0.75)
    assert result.failures == ["NameError: name 'g' is not defined"]


def test_a_solution_that_ends_early_has_not_passed(sandbox):
    for code in ("import sys; sys.exit(0)", "import os; os._exit(0)", "f = 1 /", "raise SystemExit"):
        assert run_tests(sandbox, code, ["pass"]).passed == 0


def test_programs_are_tested_by_their_output(sandbox):
    tests = [{"input": "3\n", "output": "6"}, {"input": "4\n", "output": "9\n"}]
    result = run_tests(sandbox, "print(int(input()) * 2, ' ')", tests)
    assert (result.share, result.failures) == (0.5, ["wrong output"])
    with pytest.raises(ValueError, match="a test is Python text or has 'input' and 'output', got 3"):
        run_tests(sandbox, "", [3])


def test_no_more_programs_run_at_a_time_than_there_are_workers():
    sandbox = Sandbox(isolation="full" if FULL else "partial", workers=1)
    begin = time.monotonic()
    threads = [threading.Thread(target=sandbox.run, args=("import time; time.sleep(0.5)",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin > 1.5


def test_an_interpreter_that_is_not_there_is_said_at_once():
    with pytest.raises(ValueError, match="cannot run /usr/bin/no-python: .*No such file.*sandbox.init_args.python"):
        Sandbox(isolation="partial", python="/usr/bin/no-python")


def test_of_a_python_in_a_private_directory_the_program_gets_what_is_inside(tmp_path) -> None:
    prefix = tmp_path / "venv"
    (prefix / "bin").mkdir(parents=True)
    prefix.chmod(0o755)
    assert enterable(prefix) == [prefix]
    prefix.chmod(0o700)  # as mktemp makes directories
    assert enterable(prefix) == [prefix / "bin"]
