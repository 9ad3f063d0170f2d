"""A tiny random Qwen3 on disk, and batches for it."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import rl2lightning  # noqa: F401 - before any test imports Lightning: see compat.do_without_companions_for_cuda

REPO = Path(__file__).parents[1]
QUICKSTART_MODEL = REPO / "configs/quickstart/model"


def write_model(directory: Path, *, seed: int = 0, **changes) -> Path:
    """A model directory with random weights and the quickstart's character tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": 104,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    config = Qwen3Config(**{**settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(QUICKSTART_MODEL).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes another tiny model, its config changed by keywords; returns its directory."""
    return lambda **changes: str(write_model(tmp_path_factory.mktemp("variant") / "model", **changes))


TASK = """
PROBLEMS = [(a, b) for a in range(8) for b in range(8)]


def prompts():
    return [{"messages": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in PROBLEMS]


def conversations():
    rows = prompts()
    return [{**row, "messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in rows]


def pairs():
    rows = [(row["messages"], row["answer"]) for row in prompts()]
    return [{"messages": asked, "chosen": answer, "rejected": str(int(answer) + 1)} for asked, answer in rows]


def labelled():
    kinds = ["chosen", "rejected", "rejected"] * len(PROBLEMS)
    rows = zip(pairs(), kinds)
    return [{"messages": r["messages"], "completion": r[kind], "label": kind == "chosen"} for r, kind in rows]


def reward_fn(messages, answer):
    # share of even characters: varied among the samples of a model that knows nothing yet
    text = messages[-1]["content"]
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
"""


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python file with 64 additions as prompts, conversations, pairs and labels, and a reward any model can earn."""
    path = tmp_path_factory.mktemp("task") / "task.py"
    path.write_text(TASK)
    return str(path)


@pytest.fixture(autouse=True)
def _nothing_left_in_the_environment() -> Iterator[None]:
    """A fit leaves its process group's address and its seed there, where processes and runs of later tests find it."""
    yield
    for name in ("PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        os.environ.pop(name, None)


# other tests of this process have left a process group behind, and its address in the environment
INHERITED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED"}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in INHERITED} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture
def environment() -> dict[str, str]:
    return _environment()


@pytest.fixture(scope="session")
def run_on() -> Callable[..., None]:
    """Runs a Python program to its end in one group of real processes (one: without torchrun); it must succeed."""

    def run(world_size: int, *program: str | Path, timeout: int = 300) -> None:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", f"--master-port={_free_port()}"]
        command = [sys.executable, *(torchrun if world_size > 1 else []), *map(str, program)]
        environment = _environment() | {"PYTHONPATH": str(REPO / "tests/helpers")}
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]

    return run


class FakeService:
    """An HTTP server that can be taken down and brought back on the same port.

    `answer(payload, headers)` gives (status, body); a body of bytes is sent as it is.
    """

    def __init__(self, answer: Callable[[Any, dict[str, str]], tuple[int, Any]]) -> None:
        self.answer = answer
        self.payloads: list[Any] = []
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/ask"

    def up(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.payloads.append(payload)
                status, body = service.answer(payload, dict(self.headers))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", body)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None: ...  # a client that gave up waiting

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@pytest.fixture
def fake_service() -> Iterator[Callable[..., FakeService]]:
    """Starts servers by their `answer`; they end with the test."""
    services: list[FakeService] = []

    def start(answer: Callable[[Any, dict[str, str]], tuple[int, Any]]) -> FakeService:
        services.append(FakeService(answer))
        return services[-1]

    yield start
    for service in services:
        service.down()
