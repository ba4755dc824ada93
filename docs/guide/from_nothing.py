"""An engine in one file: it loads tiny-qwen3 and answers a prompt, greedily and in float32.

python docs/guide/from_nothing.py "tell me a story about a fox"    chapter 0 of the guide explains each part
"""

import json
import sys
from importlib.resources import files

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

FOLDER = files("nanovllm") / "assets" / "tiny-qwen3"
CONFIG = json.loads((FOLDER / "config.json").read_text())
WEIGHTS = {name: tensor.float() for name, tensor in load_file(str(FOLDER / "model.safetensors")).items()}
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
NUM_LAYERS = CONFIG["num_hidden_layers"]
HEAD_SIZE = CONFIG["head_dim"]


def norm(x, name):
    """Divide each row of numbers by the root of the mean of its squares; multiply by learned weights."""
    root = (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt()
    return x / root * WEIGHTS[name + ".weight"]


def project(x, name):
    """Multiply by a matrix of the model, which lies there as [out, in]."""
    return x @ WEIGHTS[name + ".weight"].T


def rotate(x, positions):
    """Turn pairs of numbers of each head, x [n, heads, 32], by angles that grow with the position (RoPE)."""
    half = HEAD_SIZE // 2
    speeds = CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
    angles = positions[:, None, None] * speeds
    left = x[..., :half]
    right = x[..., half:]
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
    return torch.cat(turned, -1)


def make_heads(x, name, positions):
    """Return the queries [n, 8, 32], keys [n, 2, 32] and values [n, 2, 32] of n tokens."""
    queries = project(x, name + ".q_proj").unflatten(-1, (-1, HEAD_SIZE))
    keys = project(x, name + ".k_proj").unflatten(-1, (-1, HEAD_SIZE))
    values = project(x, name + ".v_proj").unflatten(-1, (-1, HEAD_SIZE))
    queries = rotate(norm(queries, name + ".q_norm"), positions)
    keys = rotate(norm(keys, name + ".k_norm"), positions)
    return queries, keys, values


def compare(queries, keys, positions):
    """Return how much each of n tokens attends to each of all tokens up to its own, [8, n, all]."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", queries, keys) / HEAD_SIZE**0.5
    is_later = torch.arange(len(keys)) > positions[:, None]
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


def attend(x, name, positions, cache):
    """Let n tokens see those before them. The cache has the keys and values of those; add the new ones."""
    queries, keys, values = make_heads(x, name, positions)
    if name in cache:
        keys = torch.cat((cache[name][0], keys))
        values = torch.cat((cache[name][1], values))
    cache[name] = (keys, values)
    attention = compare(queries, keys, positions)
    values = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    seen = torch.einsum("hnm,mhd->nhd", attention, values).flatten(1)
    return project(seen, name + ".o_proj")


def think(x, name):
    """Apply the MLP to each token by itself."""
    gate = project(x, name + ".gate_proj")
    up = project(x, name + ".up_proj")
    return project(torch.nn.functional.silu(gate) * up, name + ".down_proj")


def forward(token_ids, cache):
    """Return the logits [664] after the last token. token_ids are those that come after the cached ones."""
    start = len(cache["model.layers.0.self_attn"][0]) if cache else 0
    positions = torch.arange(start, start + len(token_ids))
    x = WEIGHTS["model.embed_tokens.weight"][token_ids]
    for i in range(NUM_LAYERS):
        name = f"model.layers.{i}"
        x = x + attend(norm(x, name + ".input_layernorm"), name + ".self_attn", positions, cache)
        x = x + think(norm(x, name + ".post_attention_layernorm"), name + ".mlp")
    return project(norm(x[-1], "model.norm"), "model.embed_tokens")


def generate_without_cache(prompt_ids, max_tokens):
    """Compute all tokens again for each new one."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(int(forward(token_ids, {}).argmax()))
        if token_ids[-1] == CONFIG["eos_token_id"]:
            break
    return token_ids[len(prompt_ids) :]


def generate(prompt_ids, max_tokens):
    """Compute the prompt once, and then each new token once."""
    cache = {}
    output = [int(forward(prompt_ids, cache).argmax())]
    while len(output) < max_tokens and output[-1] != CONFIG["eos_token_id"]:
        output.append(int(forward(output[-1:], cache).argmax()))
    return output


if __name__ == "__main__":
    print(TOKENIZER.decode(generate(TOKENIZER.encode(" ".join(sys.argv[1:]) or "1 2 3").ids, 60)))
