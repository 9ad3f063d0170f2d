import pytest
import torch

from rl2lightning import FSDP2TPStrategy
from rl2lightning.parallel import offload
from rl2lightning.parallel.offload import in_host_memory, optimizer_tensors


def test_storages_are_empty_inside_and_as_before_afterwards() -> None:
    x = torch.arange(6.0)
    parameter = torch.nn.Parameter(x[:4])  # a view, as a shard is one of its padded buffer
    with in_host_memory([parameter]):
        assert parameter.untyped_storage().nbytes() == 0
        assert x.untyped_storage().nbytes() == 0
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.tolist() == [0, 1, 2, 3]
    assert parameter.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_views_of_one_storage_are_moved_once() -> None:
    x = torch.arange(6.0)
    with in_host_memory([x[:3], x[3:], x]):
        assert x.untyped_storage().nbytes() == 0
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_host_keeps_them_in_pieces_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_CHUNK", 5)  # bytes: no tensor begins or ends with a piece
    tensors = [torch.arange(3.0), torch.arange(7, dtype=torch.int16), torch.arange(4, dtype=torch.uint8)]
    assert [len(chunk) for chunk in offload._host_chunks(12, pin=False)] == [5, 5, 2]
    with in_host_memory(tensors):
        assert [x.untyped_storage().nbytes() for x in tensors] == [0, 0, 0]
    assert [x.tolist() for x in tensors] == [[0, 1, 2], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]]


def test_an_error_inside_gives_everything_back() -> None:
    x = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="engine"), in_host_memory([x]):
        raise RuntimeError("engine")
    assert x.tolist() == [0, 1, 2]


def test_the_moments_are_what_an_optimizer_has_to_move() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state[weight]
    tensors = list(optimizer_tensors([optimizer]))
    assert {id(x) for x in tensors} == {id(state["exp_avg"]), id(state["exp_avg_sq"])}


@pytest.mark.parametrize(("cpu_offload", "inside"), [(False, 0), (True, 24)])
def test_what_is_in_host_memory_anyway_is_left_there(cpu_offload: bool, inside: int) -> None:
    strategy = FSDP2TPStrategy(offload="all", cpu_offload=cpu_offload)
    strategy.model = torch.nn.Linear(3, 2, bias=False)
    storage = strategy.model.weight.untyped_storage()
    with strategy.offloaded():
        size = storage.nbytes()
    assert size == inside
    assert storage.nbytes() == 24
