import pytest
import torch.distributed as dist

from rl2lightning.parallel.mesh import build_meshes, mesh_shape


def test_shard_takes_what_the_others_leave() -> None:
    assert mesh_shape(1) == (1, 1, 1, 1)
    assert mesh_shape(8) == (1, 8, 1, 1)
    assert mesh_shape(8, replicate=2) == (2, 4, 1, 1)
    assert mesh_shape(16, replicate=2, context=2, tensor=4) == (2, 1, 2, 4)


def test_all_sizes_may_be_given() -> None:
    assert mesh_shape(24, replicate=2, shard=3, context=2, tensor=2) == (2, 3, 2, 2)


def test_processes_that_the_sizes_do_not_divide_are_named_with_them() -> None:
    with pytest.raises(ValueError, match=r"6 processes cannot be divided by replicate \* context \* tensor = 4"):
        mesh_shape(6, replicate=2, tensor=2)


def test_one_process_is_one() -> None:
    with pytest.raises(ValueError, match=r"^1 process cannot be divided by .* = 2; change trainer\.devices"):
        mesh_shape(1, tensor=2)
    with pytest.raises(ValueError, match="does not equal the 1 process started"):
        mesh_shape(1, shard=2)


def test_a_product_other_than_the_processes_is_named_with_its_factors() -> None:
    with pytest.raises(
        ValueError,
        match=r"replicate=2 \* shard=2 \* context=1 \* tensor=1 = 4 does not equal the 8 processes .*shard to 'auto'",
    ):
        mesh_shape(8, replicate=2, shard=2)


@pytest.mark.parametrize("axis", ["replicate", "shard", "context", "tensor"])
def test_a_size_below_one_is_named(axis: str) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{axis}=0 must be at least 1"):
        mesh_shape(8, **{axis: 0})


def test_fits_of_one_shape_share_the_groups_of_one_world() -> None:
    if dist.is_initialized():  # by a fit of another test
        dist.destroy_process_group()
    alone = (1, 1, 1, 1)
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found.append(build_meshes("cpu", alone))
        assert build_meshes("cpu", alone) is found[-1]
        dist.destroy_process_group()
    assert found[0] is not found[1]  # the groups of a world that has ended are of no use to the next
