"""Under SLURM's variables two processes find each other, and a requeue goes on where the job was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rl2lightning.parallel import checkpoint as ckpt


def tasks(fit: list[str], environment: dict[str, str], port: int) -> list[subprocess.Popen[str]]:
    """What `srun` would start on two nodes with a task each."""
    job = {
        "SLURM_JOB_ID": f"4{port - 15000:04d}",  # Lightning makes the port of its last four digits
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",  # of which the first name is the address
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_LOCALID": "0",
    }
    return [
        subprocess.Popen(
            [sys.executable, *fit],
            env=environment | job | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.stdout.read()[-4000:]  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_slurm_starts_requeues_and_ends_a_job(fit_sft, environment, tmp_path: Path) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    root = tmp_path / "runs"
    # which checkpoints there are when the job is requeued, and may be killed
    scontrol.write_text(f'#!/bin/sh\necho "$@" `cd {root}; ls -d hpc_*` >> {tmp_path}/scontrol.log\n')
    scontrol.chmod(0o755)
    environment |= {"PATH": f"{scontrol.parent}:{environment['PATH']}"}
    saving = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=1"]
    saving += ["--trainer.strategy.async_checkpoints=true"]
    port = 15000 + os.getpid() % 9000
    job = fit_sft(root, "--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.max_steps=100000", *saving)
    processes = tasks(job, environment, port)
    try:
        wait_for(root / "version_0/checkpoints", processes)
        os.kill(processes[1].pid, signal.SIGUSR1)  # the time limit is near; one of them suffices
        wait_for(tmp_path / "scontrol.log", processes)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [143, 143], outputs[0][-4000:]
    assert "shard 2" in outputs[0]
    assert (tmp_path / "scontrol.log").read_text() == f"requeue 4{port - 15000:04d} hpc_ckpt_1.ckpt\n"
    requeued = root / "hpc_ckpt_1.ckpt"
    ckpt.check(requeued)
    step = ckpt.read_meta(requeued)["global_step"]
    assert ckpt.read_meta(root / "version_0/checkpoints/interrupted.ckpt")["global_step"] > step > 0

    job = fit_sft(root, "--trainer.devices=1", "--trainer.num_nodes=2", f"--trainer.max_steps={step + 2}")
    processes = tasks(job, environment, port)
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-4000:]
    assert f"Restored all states from the checkpoint at {requeued}" in outputs[0]
    assert ckpt.read_meta(ckpt.newest([root / "version_1/checkpoints"]))["global_step"] == step + 2  # type: ignore[arg-type]
