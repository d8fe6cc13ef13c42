"""Loading checkpoints: layouts that are accepted, and what is said about those that are not."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from atom.model_loader.loader import load_model
from atom.model_ops.linear import Linear
from atom.model_ops.weights import published_weights
from tests.models.harness import DENSE, LINEAR, SIZES, make_reference, save

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: save(make_reference(family), tmp_path_factory.mktemp(family)) for family in ("llama", "qwen3_5_moe")
    }


@pytest.fixture
def copy_of(folders, tmp_path):
    """A copy of a checkpoint: the folder, its weights by name, and a function that writes both back."""

    def make(family="llama", config=None):
        raw = json.loads((folders[family] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **(config or {})}))
        weights = load_file(folders[family] / WEIGHTS)
        return tmp_path, weights, lambda: save_file(weights, tmp_path / WEIGHTS)

    return make


def parameters(model):
    return dict(model.named_parameters())


def same(one, other):
    other = parameters(other)
    return all(torch.equal(param, other[name]) for name, param in parameters(one).items())


def test_sharded_equals_single(folders, tmp_path):
    make_reference("qwen3_5_moe").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(load_model(tmp_path), load_model(folders["qwen3_5_moe"]))


def test_stacked_experts_equal_single_ones(folders, copy_of):
    folder, weights, write = copy_of("qwen3_5_moe")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([weights.pop(f"{prefix}.{e}.{part}.weight") for e in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        weights[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        weights[f"{prefix}.down_proj"] = parts["down_proj"]
    write()
    assert same(load_model(folder), load_model(folders["qwen3_5_moe"]))


def test_multimodal_names_and_unused_weights(folders, copy_of):
    folder, weights, write = copy_of("qwen3_5_moe")
    for name in [name for name in weights if name.startswith("model.")]:
        weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)
    weights["model.visual.patch_embed.proj.weight"] = torch.zeros(2)
    weights["mtp.fc.weight"] = torch.zeros(2)
    write()
    assert same(load_model(folder), load_model(folders["qwen3_5_moe"]))


def test_text_part_of_a_multimodal_configuration(tmp_path):
    text = transformers.Qwen3_5TextConfig(**SIZES, **DENSE, **LINEAR)
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), architectures=["Qwen3_5ForConditionalGeneration"])
    reference = make_reference("qwen3_5")
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    model = load_model(tmp_path)
    assert model.hidden_size == SIZES["hidden_size"] and model.max_position == SIZES["max_position_embeddings"]


def test_tied_head(copy_of):
    folder, weights, write = copy_of(config={"tie_word_embeddings": True})
    write()
    model = load_model(folder)
    rows = torch.randn(2, 64)
    expected = rows @ weights["model.embed_tokens.weight"].t()
    torch.testing.assert_close(model.compute_logits(rows), expected, rtol=1e-4, atol=1e-4)
    del weights["lm_head.weight"]
    write()
    assert same(load_model(folder), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(folders, dtype):
    model = load_model(folders["qwen3_5_moe"], dtype)
    wanted = getattr(torch, dtype)
    params = parameters(model)
    assert params["model.embed_tokens.weight"].dtype == wanted
    for name, param in params.items():
        if "linear_attn.gates" in name or "linear_attn.norm" in name or name.endswith("layernorm.weight"):
            assert param.dtype == torch.float32, name
    rows = torch.zeros(1, 64, dtype=wanted)
    assert model.compute_logits(rows).dtype == torch.float32


def test_bfloat16_without_onednn_s_products(folders, monkeypatch):
    packed = load_model(folders["qwen3_5_moe"], "bfloat16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    plain = load_model(folders["qwen3_5_moe"], "bfloat16")
    assert all(module.packed is None for module in plain.modules() if isinstance(module, Linear))
    rows = torch.randn(3, 64).to(torch.bfloat16)
    torch.testing.assert_close(plain.compute_logits(rows), packed.compute_logits(rows), rtol=2e-2, atol=2e-2)


def test_auto_dtype_is_the_configuration_s(copy_of):
    folder, _, write = copy_of(config={"dtype": "bfloat16"})
    write()
    assert load_model(folder).dtype == torch.bfloat16
    assert load_model(folder, "float32").dtype == torch.float32


def test_every_parameter_is_covered_once(folders):
    """The targets tile the model's parameters: as many elements, none twice."""
    model = load_model(folders["qwen3_5_moe"])
    targets = published_weights(model).values()
    elements = sum(target.dest.numel() for target in targets)
    assert elements == sum(param.numel() for param in model.parameters())


def test_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="folder not found"):
        load_model(tmp_path / "nowhere")


def test_missing_config(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path)


def test_broken_config(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        load_model(tmp_path)


def test_unsupported_architecture(copy_of):
    folder, _, _ = copy_of(config={"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*supported: LlamaForCausalLM.*Qwen3NextForCausalLM"):
        load_model(folder)


def test_unsupported_dtype(folders):
    with pytest.raises(ValueError, match="int8"):
        load_model(folders["llama"], "int8")


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_unsupported_settings(copy_of, setting, message):
    folder, _, write = copy_of(config=setting)
    write()
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_no_weights(copy_of):
    folder, _, _ = copy_of()
    with pytest.raises(ValueError, match="no safetensors file"):
        load_model(folder)


def test_index_with_missing_shard(copy_of):
    folder, _, _ = copy_of()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"shard-1\.safetensors"):
        load_model(folder)


def test_missing_weight(copy_of):
    folder, weights, write = copy_of()
    del weights["model.layers.2.self_attn.k_proj.weight"]
    write()
    with pytest.raises(ValueError, match=r"missing weights: model\.layers\.2\.self_attn\.k_proj\.weight"):
        load_model(folder)


def test_unknown_weight(copy_of):
    folder, weights, write = copy_of()
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    write()
    with pytest.raises(ValueError, match=r"unknown weights: model\.layers\.0\.self_attn\.sinks"):
        load_model(folder)


def test_wrong_shape(copy_of):
    folder, weights, write = copy_of()
    weights["model.norm.weight"] = torch.zeros(63)
    write()
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* has shape \[63\], expected \[64\]"):
        load_model(folder)


def test_weight_stored_twice(copy_of):
    folder, weights, write = copy_of()
    write()
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "more.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored twice"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 2000, -100])
def test_truncated_file(copy_of, keep):
    folder, _, write = copy_of()
    write()
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(ValueError, match="truncated"):
        load_model(folder)
