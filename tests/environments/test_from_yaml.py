"""All of it can be said in a config file."""

import sys
from pathlib import Path

import pytest

from rl2lightning.cli import CLI
from rl2lightning.environments import FunctionTool, PythonTool, Sandbox, SearchTool, TagFormat, ToolEnvironment
from rl2lightning.rewards import ClassifyReward, CodeTests, RemoteReward

REPO = Path(__file__).parents[2]
CONFIG = """
trainer:
  callbacks:
    - class_path: rl2lightning.RolloutCallback
      init_args:
        max_turns: 3
        environment:
          class_path: rl2lightning.ToolEnvironment
          init_args:
            tools:
              - configs/quickstart/calculator.py:calculator
              - class_path: rl2lightning.environments.FunctionTool
                init_args: {function: "configs/quickstart/calculator.py:calculator", timeout: 3, name: other}
              - {class_path: rl2lightning.environments.SearchTool, init_args: {url: "http://127.0.0.1:1/retrieve"}}
              - class_path: rl2lightning.environments.PythonTool
                init_args:
                  sandbox: {class_path: rl2lightning.environments.Sandbox, init_args: {wall_seconds: 3}}
            format:
              class_path: rl2lightning.environments.TagFormat
              init_args: {tool: search, argument: query}
            runner: {class_path: rl2lightning.environments.ProcessRunner, init_args: {num_workers: 2}}
            call_cost: 0.01
        rewards:
          - {class_path: rl2lightning.rewards.CodeTests}
          - {class_path: rl2lightning.rewards.RemoteReward, init_args: {url: "http://127.0.0.1:1/", columns: [level]}}
          - {class_path: rl2lightning.rewards.ClassifyReward, init_args: {url: "http://127.0.0.1:1/classify"}}
"""


def test_tools_sandbox_search_and_served_rewards_come_from_yaml(tmp_path, monkeypatch):
    try:
        Sandbox()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "argv", ["rl2lightning"])
    (tmp_path / "tools.yaml").write_text(CONFIG)
    configs = ("configs/quickstart/tools.yaml", str(tmp_path / "tools.yaml"))
    cli = CLI(args=[f"--config={path}" for path in configs] + ["--trainer.accelerator=cpu"], run=False)
    callback = next(c for c in cli.trainer.callbacks if type(c).__name__ == "RolloutCallback")
    environment = callback.environment
    assert isinstance(environment, ToolEnvironment)
    assert environment.format == TagFormat("search", "query")
    assert environment.call_cost == 0.01
    kinds = {name: (type(tool), tool.timeout) for name, tool in environment._tools.items()}
    assert kinds["calculator"] == (FunctionTool, 10.0)
    assert kinds["other"] == (FunctionTool, 3)
    assert (kinds["search"][0], kinds["python"][0]) == (SearchTool, PythonTool)
    assert environment._tools["python"].sandbox.wall_seconds == 3
    assert [type(reward) for reward in callback.rewards] == [CodeTests, RemoteReward, ClassifyReward]
    assert callback.rewards[1].columns == ("level",)
