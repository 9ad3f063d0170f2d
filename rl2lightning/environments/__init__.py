"""What a policy can talk to: environments in message space, which never see a token id."""

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.python_exec import PythonTool, Sandbox
from rl2lightning.environments.script import ScriptEnvironment
from rl2lightning.environments.search import SearchTool
from rl2lightning.environments.tool_calls import HermesFormat, LlamaFormat, QwenCoderFormat, TagFormat, ToolCallFormat
from rl2lightning.environments.tool_runners import ProcessRunner, ThreadRunner, ToolRunner
from rl2lightning.environments.tool_schema import function_schema
from rl2lightning.environments.tools import FunctionTool, Tool, ToolEnvironment

__all__ = [
    "Environment",
    "FunctionTool",
    "HermesFormat",
    "LlamaFormat",
    "ProcessRunner",
    "PythonTool",
    "QwenCoderFormat",
    "Sandbox",
    "ScriptEnvironment",
    "SearchTool",
    "StepResult",
    "TagFormat",
    "ThreadRunner",
    "Tool",
    "ToolCallFormat",
    "ToolEnvironment",
    "ToolRunner",
    "function_schema",
]
