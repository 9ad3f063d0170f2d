"""Runs Python that a model wrote, in processes of its own that can do little harm; as a tool, or to test an answer."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl2lightning.environments.tools import Tool

_log = logging.getLogger(__name__)
_START_SECONDS = 30.0  # for the launcher itself, on a busy machine

_LOST = {
    "network": "a network of its own (none): programs can reach yours",
    "user": "a user of its own: programs have your rights",
    "processes": "a process namespace: programs can see other processes",
    "filesystem": "a file system of its own: programs can read what their user can, and write outside their directory",
}


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    status: Literal["ok", "error", "timeout", "memory", "output", "files"]
    exit_code: int | None  # negative: the signal that ended it; None: it was stopped for `status`
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class SandboxError(RuntimeError):
    """The sandbox itself failed; no program was run to its end."""


class Sandbox:
    """Runs Python programs, each from nothing, one after another or side by side. Linux only.

    `full` isolation gives a program: a user id that nobody has (or, where we are not root, a user namespace), no
    network, its own process namespace, which ends with it (also what it detached), and a file system of nothing but
    read-only system directories, this Python and a small directory of its own in memory. No environment variables of
    ours. Limits: CPU and wall time, memory, processes, files and their size, output.

    Not protected: the kernel, which all share (a hole in it is a way out; for hostile programs use a virtual machine),
    the CPU (`workers` programs of `max_processes` processes at full speed), and what stands in the Python environment,
    which programs can read.

    Args:
        isolation: `full` refuses to begin where the system does not permit all of it (containers without the right to
            make namespaces). `partial` makes do with what is permitted, and says what is missing: at least limits, and
            a user id of its own where we are root.
        wall_seconds: a program that takes longer is killed.
        cpu_seconds: for each process.
        memory_mb: of address space for each process, and of resident memory for all together.
        max_processes: at a time, threads included (and, where a program runs under your own user id, yours too).
        disk_mb: of the program's directory, and of each file.
        max_files: in the program's directory.
        max_output: characters of stdout and stderr; a program that writes more is killed.
        visible: further paths that programs can read (not write); they take effect with a file system of its own.
        python: interpreter for the programs; None: this one, with its packages.
        environment: variables that programs get beside PATH, LANG, HOME and OMP_NUM_THREADS=1.
        workers: programs that run at a time.

    Raises:
        ValueError: not Linux, a limit that is not positive, or `full` isolation that is not to be had.
    """

    def __init__(
        self,
        isolation: Literal["full", "partial"] = "full",
        wall_seconds: float = 10.0,
        cpu_seconds: int = 5,
        memory_mb: int = 512,
        max_processes: int = 16,
        disk_mb: int = 16,
        max_files: int = 100,
        max_output: int = 65_536,
        visible: Sequence[str] = (),
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        workers: int = 8,
    ) -> None:
        limits = {
            "cpu_seconds": cpu_seconds,
            "memory_mb": memory_mb,
            "max_processes": max_processes,
            "disk_mb": disk_mb,
            "max_files": max_files,
            "max_output": max_output,
        }
        for name, value in {**limits, "wall_seconds": wall_seconds, "workers": workers}.items():
            if value <= 0:
                raise ValueError(f"sandbox.init_args.{name}={value} must be positive")
        if sys.platform != "linux":
            raise ValueError(f"the sandbox needs Linux, not {sys.platform}: run it in a container or a virtual machine")
        self.isolation, self.wall_seconds, self.python = isolation, wall_seconds, python or sys.executable
        self._slots = threading.BoundedSemaphore(workers)
        self._settings: dict[str, Any] = {
            **limits,
            "wall_seconds": wall_seconds,
            "required": list(_LOST) if isolation == "full" else [],
            "python": [*_prefixes(python), *([] if python else [sys.prefix, sys.exec_prefix, sys.base_prefix])],
            "visible": [str(Path(path).expanduser().resolve()) for path in visible],
            "environment": {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **(environment or {})},
        }
        self._probe()

    def run(self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """Runs a program.

        Args:
            code: its text.
            stdin: what it can read.
            files: further files in its directory, by name.

        Raises:
            SandboxError: the sandbox could not be set up, or was itself ended.
        """
        names = {"main.py": code, **(files or {})}
        if odd := [name for name in names if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise ValueError(f"a file of the sandbox is a plain name without directories, not '{odd[0]}'")
        result = self._launch(names, stdin)
        stopped, code_ = result["stopped_for"], result["exit"]
        if "failed" in result or (stopped is None and code_ is None):
            raise SandboxError(f"the program could not be started: {result.get('failed') or result['missing']}")
        if stopped is None and code_ in (-24, -9) and "MemoryError" not in result["stderr"]:
            stopped = "timeout"  # SIGXCPU, and the SIGKILL after it: no more CPU time
        status = stopped or ("ok" if code_ == 0 else "error")
        return Ran(status, None if stopped else code_, result["stdout"], result["stderr"], result["seconds"])

    def _launch(self, files: Mapping[str, str], stdin: str) -> dict[str, Any]:
        settings = {
            **self._settings,
            "files": {name: _encodable(text) for name, text in files.items()},
            "stdin": _encodable(stdin),
            "command": [self.python, "-B", "-u", "main.py"],
        }
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_launcher.py"))]
        with self._slots:
            try:
                done = subprocess.run(
                    launcher,
                    input=json.dumps(settings),
                    capture_output=True,
                    text=True,
                    env=self._settings["environment"],
                    cwd="/",
                    start_new_session=True,
                    timeout=self.wall_seconds + _START_SECONDS,
                )
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"the sandbox did not answer within {error.timeout:g} s") from error
        try:
            return json.loads(done.stdout)
        except json.JSONDecodeError as error:
            said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise SandboxError(f"the sandbox failed: {said}") from error

    def _probe(self) -> None:
        """Finds out what the system permits."""
        result = self._launch({"main.py": ""}, "")
        if "failed" in result:
            raise ValueError(
                f"the sandbox cannot run {self.python}: {result['failed']}; set sandbox.init_args.python to an "
                "interpreter that every user can run, such as /usr/bin/python3"
            )
        if not result["missing"]:
            return
        lost = "; ".join(_LOST[name] for name in result["missing"])
        if self.isolation == "full":
            raise ValueError(
                f"the sandbox cannot have {lost} ({result['reason'] or 'namespaces are refused'}). Give the container "
                "the right to make namespaces (CAP_SYS_ADMIN, or user namespaces), or set isolation: partial to go "
                "without, where it is isolated by other means"
            )
        _log.warning("the sandbox goes without %s", lost)


@dataclass(frozen=True)
class Verdict:
    """How a solution did: tests passed, of how many, and why each of the others was not."""

    passed: int
    total: int
    failures: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


def run_tests(sandbox: Sandbox, code: str, tests: Sequence[Any]) -> Verdict:
    """Runs a solution against tests, each in a sandbox of its own.

    Args:
        tests: Python text that raises where the solution is wrong (`assert f(2) == 4`), run after the solution with its
            names; or {"input", "output"}: the program is given the input on stdin and must print the output (blanks at
            line ends and at the end aside).

    A solution that ends the process before the test is done (`sys.exit()`) has not passed. It shares the process with
    the text of its test, though: a program bent on passing without solving can find a way. With {"input", "output"}
    it cannot.
    """
    failures: list[str] = []
    for test in tests:
        if isinstance(test, str):
            token = os.urandom(16).hex()
            ran = sandbox.run(_DRIVER, stdin=json.dumps([test, token]), files={"solution.py": code})
            right = ran.ok and ran.stdout.rstrip().endswith(token)
        elif isinstance(test, Mapping) and "output" in test:
            ran = sandbox.run(code, stdin=str(test.get("input", "")))
            right = ran.ok and _lines(ran.stdout) == _lines(str(test["output"]))
        else:
            raise ValueError(f"a test is Python text or has 'input' and 'output', got {test!r:.200}")
        if not right:
            last = ran.stderr.strip().rpartition("\n")[2]
            failures.append(last or ("wrong output" if ran.ok else ran.status))
    return Verdict(len(tests) - len(failures), len(tests), failures)


# in the sandbox: the solution first, the test after it, and last what proves that both came to their end
_DRIVER = """
import json, runpy, sys
names = runpy.run_path("solution.py", run_name="solution")
test, token = json.load(sys.stdin)
with open("test.py", "w") as file:
    file.write(test)
runpy.run_path("test.py", init_globals=names)
print()
print(token)
"""


class PythonTool(Tool):
    """The tool `python`: runs a program in a sandbox and returns what it printed.

    Args:
        sandbox: limits and isolation; None: the default ones.
        name: what the model calls it.
    """

    isolated = True

    def __init__(self, sandbox: Sandbox | None = None, name: str = "python") -> None:
        self.sandbox = sandbox or Sandbox()
        description = "Runs a Python program and returns what it prints. Nothing is kept between calls."
        code = {"type": "string", "description": "The program; print what you want to see."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        schema = {"name": name, "description": description, "parameters": parameters}
        # its turn may have to wait for those before it
        super().__init__({"type": "function", "function": schema}, timeout=10 * (self.sandbox.wall_seconds + 30))

    def __call__(self, arguments: dict[str, Any]) -> str:
        ran = self.sandbox.run(arguments["code"])
        said = ran.stdout + ran.stderr
        if ran.ok:
            return said if said.strip() else "(no output; print what you want to see)"
        why = {
            "error": f"exit code {ran.exit_code}",
            "timeout": "it took too long and was stopped",
            "memory": "it used too much memory and was stopped",
            "output": "it printed too much and was stopped",
            "files": "it wrote too many files and was stopped",
        }[ran.status]
        return f"{said.rstrip()}\n({why})".lstrip()


def _prefixes(python: str | None) -> list[str]:
    """The directories that an interpreter needs: those above its bin, before and after links are followed."""
    path = Path(python or sys.executable)
    return [str(path.parent.parent), str(path.resolve().parent.parent)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
