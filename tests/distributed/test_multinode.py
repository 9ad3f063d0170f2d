"""Two nodes, each a torchrun agent in a network of its own where namespaces can be made, train together."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def nodes() -> Iterator[tuple[list[list[str]], str, list[str]]]:
    """What a command is run under on each node, the first one's address, the network interface of each."""
    names = [f"rl2l-{os.getpid()}-{i}" for i in (0, 1)]
    # two hosts and a cable between them
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [
        ["ip", "link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "cable1", "netns", names[1]]
    ]
    for i, name in enumerate(names):
        within = ["ip", "-n", name]
        commands += [
            [*within, "address", "add", f"10.77.0.{i + 1}/24", "dev", f"cable{i}"],
            [*within, "link", "set", f"cable{i}", "up"],
            [*within, "link", "set", "lo", "up"],
        ]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
        yield [["ip", "netns", "exec", name] for name in names], "10.77.0.1", ["cable0", "cable1"]
    except (OSError, subprocess.CalledProcessError):  # no such tool, or not allowed: two agents on one host
        yield [[], []], "127.0.0.1", ["lo", "lo"]
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=True)


def losses(root: Path) -> list[float]:
    files = list(root.glob("version_0/metrics.csv"))
    if not files:
        return []
    with files[0].open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def trainer_of(agent: int) -> int:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if b"rl2lightning" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_two_nodes_train_as_one_and_end_together(nodes, fit_sft, environment, free_port, tmp_path: Path) -> None:
    prefixes, address, interfaces = nodes
    port = free_port()
    together = tmp_path / "together"
    agents: list[subprocess.Popen[str]] = []
    try:
        for rank, (prefix, interface) in enumerate(zip(prefixes, interfaces, strict=True)):
            torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"]
            torchrun += [f"--master-addr={address}", f"--master-port={port}"]
            fit = fit_sft(together, "--trainer.num_nodes=2", "--trainer.max_steps=100000")
            command = [*prefix, sys.executable, *torchrun, *fit]
            own = environment | {"GLOO_SOCKET_IFNAME": interface}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            agents.append(subprocess.Popen(command, env=own, text=True, **pipes))  # type: ignore[call-overload]
        deadline = time.monotonic() + 120
        while len(losses(together)) < 10:
            for agent in agents:
                assert agent.poll() is None, agent.stdout.read()[-6000:]  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(trainer_of(agents[1].pid), signal.SIGKILL)  # the second node loses its process
        killed = time.monotonic()
        outputs = [agent.communicate(timeout=60)[0] for agent in agents]
        assert time.monotonic() - killed < 60
    finally:
        for agent in agents:
            agent.kill()
    assert "shard 2" in outputs[0]
    assert all(agent.returncode for agent in agents)
    assert "Signal 9 (SIGKILL)" in outputs[1]  # the node it happened on says what
    assert "another process of the run has ended" in outputs[0]  # the other one where to look

    alone = tmp_path / "alone"
    done = subprocess.run(
        [sys.executable, *fit_sft(alone, "--trainer.devices=1", "--trainer.max_steps=10")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(together)[:10] == pytest.approx(losses(alone), rel=1e-6)
