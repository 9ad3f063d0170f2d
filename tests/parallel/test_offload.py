from copy import deepcopy

import pytest
import torch

from rl2lightning import FSDP2TPStrategy
from rl2lightning.parallel import offload
from rl2lightning.parallel.offload import ParkedMoments, in_host_memory, moments


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


def adamw(weight: torch.Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([weight], lr=0.1)


def size_of_moments(optimizer: torch.optim.Optimizer) -> int:
    return sum(x.untyped_storage().nbytes() for x in moments(optimizer))


def test_the_moments_are_what_an_optimizer_has_to_move() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = adamw(weight)
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state[weight]
    assert {id(x) for x in moments(optimizer)} == {id(state["exp_avg"]), id(state["exp_avg_sq"])}


def test_moments_are_there_in_steps_alone_and_the_steps_are_the_same() -> None:
    weight, plain = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer, reference = adamw(weight), adamw(plain)
    kept, rooms = ParkedMoments(optimizer), []
    for step in range(3):
        weight.grad = plain.grad = torch.arange(6.0).view(2, 3) - step
        optimizer.step()
        reference.step()
        assert size_of_moments(optimizer) == 0
        rooms.append(kept._room)
    assert rooms[0] is rooms[1] is rooms[2]  # no further host memory
    assert size_of_moments(reference) == 2 * 6 * 4
    assert torch.equal(weight, plain)


def test_moments_that_found_no_room_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, plain = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer, reference = adamw(weight), adamw(plain)
    kept = ParkedMoments(optimizer)
    weight.grad = plain.grad = torch.arange(6.0).view(2, 3)
    optimizer.step()
    reference.step()

    def no_room(self: offload.Parked) -> None:
        self._storages[0].resize_(self._sizes[0])
        raise torch.cuda.OutOfMemoryError("after the first of them")

    with monkeypatch.context() as patch:
        patch.setattr(offload.Parked, "give_back", no_room)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            kept.fetch()
    optimizer.step()
    reference.step()
    assert torch.equal(weight, plain)


def test_who_saves_or_loads_an_optimizer_finds_the_moments_until_they_are_parked_again() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer, loaded = adamw(weight), adamw(other)
    kept = [ParkedMoments(optimizer), ParkedMoments(loaded)]
    for x, each in ((weight, optimizer), (other, loaded)):
        x.grad = torch.full((2, 3), 2.0)
        each.step()
        x.grad = None
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state_dict()
    torch.testing.assert_close(state["state"][0]["exp_avg"], torch.full((2, 3), 0.9 * 0.2 + 0.1))
    loaded.load_state_dict(deepcopy(state))  # it would share the tensors
    assert size_of_moments(optimizer) == size_of_moments(loaded) == 2 * 6 * 4
    for each in kept:
        each.park()
        each.park()  # once is enough
    assert size_of_moments(optimizer) == size_of_moments(loaded) == 0
    torch.testing.assert_close(loaded.state_dict()["state"][0]["exp_avg"], torch.full((2, 3), 0.28))


@pytest.mark.parametrize(("cpu_offload", "inside"), [(False, 0), (True, 24)])
def test_what_is_in_host_memory_anyway_is_left_there(cpu_offload: bool, inside: int) -> None:
    strategy = FSDP2TPStrategy(offload="all", cpu_offload=cpu_offload)
    strategy.model = torch.nn.Linear(3, 2, bias=False)
    storage = strategy.model.weight.untyped_storage()
    with strategy.offloaded():
        size = storage.nbytes()
    assert size == inside
    assert storage.nbytes() == 24
