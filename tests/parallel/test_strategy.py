import signal
import subprocess

import lightning as L
import pytest

from rl2lightning import FSDP2TPStrategy
from rl2lightning.parallel.strategy import _how_ended


def test_one_process_needs_no_launcher_and_so_runs_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # set where something else has launched the processes
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    assert L.Trainer(strategy=FSDP2TPStrategy(), devices=2, **settings).strategy.launcher is not None
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    assert L.Trainer(strategy=FSDP2TPStrategy(), devices=1, **settings).strategy.launcher is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_the_first_process_keeps_no_other_waiting(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def look_up() -> str:
        happened.append("looked up")
        raise ValueError("no such model")

    monkeypatch.setattr(FSDP2TPStrategy, "global_rank", rank)
    monkeypatch.setattr(FSDP2TPStrategy, "barrier", lambda self: happened.append("met"))
    with pytest.raises(ValueError, match="no such model"):
        FSDP2TPStrategy().on_one_rank_first(look_up)
    assert happened == (["looked up", "met"] if rank == 0 else ["met", "looked up"])


def test_who_launched_a_process_says_how_it_ended() -> None:
    alive, killed, failed = (subprocess.Popen(["sh", "-c", command]) for command in ("sleep 60", "sleep 60", "exit 3"))
    killed.send_signal(signal.SIGKILL)
    try:
        failed.wait()
        killed.wait()
        assert _how_ended([alive, killed]) == "process 2 of this node was ended by SIGKILL"
        assert _how_ended([alive, failed]) == "process 2 of this node ended with exit code 3"
        assert _how_ended([]) == _how_ended([alive]) != ""
    finally:
        alive.kill()
        alive.wait()
