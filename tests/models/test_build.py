"""Models built without memory and filled from files equal those that transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2lightning.models import build
from rl2lightning.models.build import (
    build_causal_lm,
    decoder_blocks,
    full_weights,
    init_weights,
    is_tied,
    load_config,
    load_weights,
    materialize,
    meta_parameters,
    resolve_model,
    save_pretrained,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the loader's, without a strategy


def empty(directory: str, dtype: torch.dtype = torch.float32):
    """The architecture of a model directory, with memory but without its weights."""
    lm = build_causal_lm(load_config(directory), dtype)
    materialize(lm, CPU)
    return lm


def filled(directory: str, dtype: torch.dtype = torch.float32):
    lm = empty(directory, dtype)
    load_weights(lm, directory)
    return lm


def copy_of(directory: str, target: Path) -> Path:
    shutil.copytree(directory, target)
    return target


@pytest.fixture(scope="module")
def untied_model(make_model) -> str:
    return make_model(tie_word_embeddings=False)


# ---- found


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_path_that_is_no_directory_is_never_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match=f"model '{path}' is not a directory; set model.init_args.model"):
        resolve_model(path)


def test_a_hub_name_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"model 'someone/model' .* from the hub: no network"):
        resolve_model("someone/model")


def test_a_directory_needs_a_config_and_weights(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    bare = copy_of(tiny_model, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights; .*random_init: true"):
        resolve_model(str(bare))
    assert resolve_model(str(bare), weights=False) == str(bare)


def test_checkpoints_and_adapters_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt/dcp").mkdir(parents=True)
    (tmp_path / "last.ckpt/model").mkdir()
    (tmp_path / "last.ckpt/meta.pt").touch()
    (tmp_path / "last.ckpt/model/config.json").write_text("{}")
    for path in ("last.ckpt", "last.ckpt/model"):
        with pytest.raises(
            ValueError, match=rf"{path}' is a checkpoint, .* --ckpt_path {tmp_path}/last\.ckpt --output_dir"
        ):
            resolve_model(str(tmp_path / path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ValueError, match=r"is an adapter, .*\('some/base'\) .*set model\.init_args\.lora\.path to it"):
        resolve_model(str(tmp_path))


# ---- built


def test_parameters_take_no_memory_and_buffers_are_real(tiny_model: str) -> None:
    lm = build_causal_lm(load_config(tiny_model), torch.float32)
    assert all(p.is_meta for p in lm.parameters())
    reference = AutoModelForCausalLM.from_pretrained(tiny_model)
    buffers = dict(reference.named_buffers())
    assert buffers
    for name, b in lm.named_buffers():
        torch.testing.assert_close(b, buffers[name], rtol=0, atol=0)


def test_parameters_are_real_again_after_an_error() -> None:
    before = nn.Module.register_parameter

    def interrupted() -> None:
        with meta_parameters():
            assert nn.Linear(2, 2).weight.is_meta
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        interrupted()
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


def test_tied_weights_are_one_tensor_and_untied_ones_two(tiny_model: str, untied_model: str) -> None:
    for directory, tied in ((tiny_model, True), (untied_model, False)):
        lm = filled(directory)
        assert is_tied(lm) is tied
        assert (lm.get_output_embeddings().weight is lm.get_input_embeddings().weight) is tied


def test_blocks_are_the_transformer_layers(tiny_model: str) -> None:
    lm = empty(tiny_model)
    assert decoder_blocks(lm) == list(lm.model.layers)
    assert len(decoder_blocks(lm)) == 2


# ---- filled


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_those_that_transformers_loads(make_model, tmp_path: Path, tied: bool, stored) -> None:
    directory = make_model(tie_word_embeddings=tied)
    AutoModelForCausalLM.from_pretrained(directory, dtype=stored).save_pretrained(tmp_path)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {stored}
    lm = filled(str(tmp_path))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours, theirs = dict(lm.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p, rtol=0, atol=0)  # also the type: fp32 masters of a bf16 file


def test_weights_in_several_files_are_all_read(tiny_model: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, reference = filled(str(tmp_path)), filled(tiny_model)
    for (name, p), (_, q) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_missing_weight_is_named(tiny_model: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_model, tmp_path / "model")
    state = load_file(directory / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the weights of Qwen3ForCausalLM, such as 'model\.layers\.1\.mlp"):
        load_weights(empty(tiny_model), str(directory))


def test_a_weight_of_another_shape_is_named(tiny_model: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight' has the shape \[32, 48\]"):
        filled(str(directory))


def test_weights_that_the_model_has_no_place_for_are_named(tiny_model: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"11 weights .* such as 'model\.layers\.1\."):
        filled(str(directory))


def test_a_stored_copy_of_a_tied_head_is_no_news(tiny_model: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_model, tmp_path / "model")
    state = load_file(directory / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(filled(str(directory)).lm_head.weight, state["lm_head.weight"])  # and no warning


# ---- drawn


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_depend_on_the_seed_alone_and_are_those_of_transformers(make_model, tied: bool) -> None:
    directory = make_model(tie_word_embeddings=tied)
    config = load_config(directory)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    drawn = []
    for seed in (7, 7, 8):
        torch.rand(seed)  # whatever was drawn before
        lm = empty(directory)
        init_weights(lm, config, seed)
        drawn.append(dict(lm.named_parameters()))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        reference = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    assert drawn[0].keys() == reference.keys()
    for name, p in reference.items():
        assert torch.equal(drawn[0][name], p), name
        assert torch.equal(drawn[1][name], p), name
    assert not torch.equal(drawn[2]["model.embed_tokens.weight"], drawn[0]["model.embed_tokens.weight"])
    # nothing but our own draws moved the global generator
    moved = torch.get_rng_state()
    torch.set_rng_state(state)
    for seed in (7, 7, 8):
        torch.rand(seed)
    assert torch.equal(torch.get_rng_state(), moved)


# ---- given away


@pytest.mark.parametrize("tied", [True, False])
def test_full_weights_come_under_the_names_of_transformers(make_model, tied: bool) -> None:
    directory = make_model(tie_word_embeddings=tied)
    given = dict(full_weights(filled(directory)))
    reference = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())  # tied ones once
    assert list(given) == list(reference)
    assert ("lm_head.weight" in given) is not tied
    for name, p in reference.items():
        assert torch.equal(given[name], p)


def test_full_weights_are_cast(tiny_model: str) -> None:
    lm = filled(tiny_model)
    masters = dict(lm.named_parameters())
    for name, x in full_weights(lm, torch.bfloat16):
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, masters[name].bfloat16())


def test_tied_weights_of_a_checkpoint_are_written_once(tiny_model: str, tmp_path: Path) -> None:
    lm = filled(tiny_model)
    state = {name: x.detach() for name, x in lm.state_dict().items()}  # under both their names
    assert "lm_head.weight" in state
    save_pretrained(load_config(tiny_model), state, str(tmp_path))
    assert set(load_file(tmp_path / "model.safetensors")) == set(dict(lm.named_parameters()))
    assert "lm_head.weight" in state  # what was given stays whole


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_has_the_same_logits(make_model, tmp_path: Path, tied: bool) -> None:
    directory = make_model(tie_word_embeddings=tied)
    state = dict(full_weights(filled(directory)))
    save_pretrained(load_config(directory), state, str(tmp_path), tokenizer=AutoTokenizer.from_pretrained(directory))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        saved, original = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=ids).logits
            for path in (tmp_path, directory)
        )
    torch.testing.assert_close(saved, original, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path)("1+2=")["input_ids"] == [
        *AutoTokenizer.from_pretrained(directory)("1+2=")["input_ids"]
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert build.PACKED_ATTENTION not in json.dumps(config)  # nothing of ours in what others load
