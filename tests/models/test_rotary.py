"""Rotary frequencies of every supported type against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from atom.model_ops.rotary import RotaryEmbedding, rope_frequencies, rotate

SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "truncate": False,
    },
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies(rope, head_dim):
    rope = {**rope, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=dict(rope))
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    actual, actual_scale = rope_frequencies(rope, head_dim, config.max_position_embeddings)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert actual_scale == pytest.approx(scale)


def test_rotation_of_a_part_of_the_head():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    positions = torch.tensor([0, 3, 900])
    x = torch.randn(3, 2, 32)
    angles = positions[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.cat((angles, angles), -1)
    expected, _ = apply_rotary_pos_emb(x[..., :16], x[..., :16], angles.cos(), angles.sin(), unsqueeze_dim=1)
    turned = x.clone()
    rotate(turned, *RotaryEmbedding(rope, 32, 1024)(positions))
    torch.testing.assert_close(turned[..., :16], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(turned[..., 16:], x[..., 16:])


def test_unknown_type_is_refused():
    with pytest.raises(ValueError, match="longrope"):
        rope_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 64, 1024)
