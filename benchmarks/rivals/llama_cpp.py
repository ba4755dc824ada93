"""Measures llama.cpp once. An interpreter that has llama.cpp runs this file; scripts/rival_env.sh makes one.

It calls llama_decode as llama.cpp's server does: a step has one token of every sequence that decodes, then prompts, up
to n_batch tokens. The mode is one of llama.cpp's types of weights (q8_0, q4_0, q4_k_m), or "" for the comparison's.
With quantised weights llama.cpp also quantises activations, in blocks of 32 or 256 to 8 bits. In the mode "kv_q8_0" the
weights have the comparison's type, and keys and values are in q8_0, which needs llama.cpp's flash attention. "flash"
and "no_flash" turn flash attention on and off; otherwise llama.cpp chooses.
"""

import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.rivals.worker import CannotRun, DepthTimes, Engine, main

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ARCHITECTURES = {
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
}
BATCH_TOKENS = 2048
"""n_batch, llama.cpp's own default."""
FLASH = {"kv_q8_0": "ENABLED", "flash": "ENABLED", "no_flash": "DISABLED"}
"""Of the modes that decide on flash attention."""
ERROR = 4
"""llama.cpp's log level."""


errors: list[str] = []
"""Holds all that llama.cpp has said at that level."""


@llama_cpp.llama_log_callback
def print_errors(level: int, text: bytes, data: Any) -> None:
    if level == ERROR:
        errors.append(text.decode(errors="replace"))
        print(errors[-1], end="", file=sys.stderr)


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the float32 values of each tensor of the checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, mode="r", offset=8 + size)
        for name, about in header.items():
            if name == "__metadata__":
                continue
            raw = data[slice(*about["data_offsets"])]
            if about["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view({"F32": np.float32, "F16": np.float16}[about["dtype"]]).astype(np.float32)
            yield name, values.reshape(about["shape"])


def name_export(folder: Path, exports: Path, kind: str) -> Path:
    """Return where the checkpoint lies with matrices of type `kind`."""
    newest = max(path.stat().st_mtime_ns for path in folder.iterdir())
    mark = hashlib.sha256(f"{folder} {newest}".encode()).hexdigest()[:12]
    return exports / f"{folder.name}-{mark}-{kind}.gguf"


def quantize(folder: Path, exports: Path, kind: str, source: str) -> Path:
    """Let llama.cpp quantise its copy of the checkpoint, in the type `source`, unless that is done. Return the path.

    `llama_model_quantize` chooses the type of each matrix: Q4_0 and Q4_K_M keep the output matrix in Q6_K.
    """
    path = name_export(folder, exports, kind)
    if path.is_file():
        return path
    original = export(folder, exports, source)
    partial = path.with_suffix(f".{os.getpid()}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if status := llama_cpp.llama_model_quantize(str(original).encode(), str(partial).encode(), params):
        raise CannotRun(f"llama_model_quantize returned {status} for {kind}")
    partial.rename(path)
    return path


def export(folder: Path, exports: Path, kind: str) -> Path:
    """Write the checkpoint as a GGUF file with matrices of type `kind`, unless it exists. Return its path."""
    path = name_export(folder, exports, kind)
    if path.is_file():
        return path
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise CannotRun(f"the export to GGUF knows {' and '.join(ARCHITECTURES)}, and no {config['architectures'][0]}")
    exports.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[architecture])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    num_experts = config.get("num_experts", 0)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")  # token ids go in and come out
    is_hybrid = architecture in (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
    if is_hybrid:
        add_hybrid_sizes(writer, config, head_dim)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    matrices = gguf.GGMLQuantizationType[kind]
    for name, values in stack_experts(read_tensors(folder), num_experts):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if is_hybrid:
            name, values = convert_hybrid(name, values, config)
        target = names.get_name(name, (".weight", ".bias"))
        if target is None:
            raise CannotRun(f"the export to GGUF does not know the tensor {name}")
        is_matrix = values.ndim > 1 and not name.endswith(("conv1d.weight", "gate.weight"))
        chosen = matrices if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def stack_experts(tensors: Iterator[tuple[str, np.ndarray]], num_experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors, in which one has the matrices of all experts of a layer."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors:
        before, _, after = name.partition(".mlp.experts.")
        if not after:
            yield name, values
            continue
        index, _, kind = after.partition(".")
        stacked = f"{before}.mlp.experts.{kind}"
        parts.setdefault(stacked, {})[int(index)] = values
        if len(parts[stacked]) == num_experts:
            found = parts.pop(stacked)
            yield stacked, np.stack([found[i] for i in range(num_experts)])


def add_hybrid_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    """Write what llama.cpp must know of a model with linear attention. It has one size for heads of keys and values."""
    key_dim = config["linear_key_head_dim"]
    value_dim = config["linear_value_head_dim"]
    if key_dim != value_dim:
        raise CannotRun(f"llama.cpp has no linear attention with keys of {key_dim} elements and values of {value_dim}")
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])  # all alike for text
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(key_dim)
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(value_dim * config["linear_num_value_heads"])
    is_linear = [kind == "linear_attention" for kind in list_kinds(config)]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_linear)


def list_kinds(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer. By default each fourth one has full attention."""
    interval = config.get("full_attention_interval", 4)
    kinds = ["linear_attention", "full_attention"]
    default = [kinds[(i + 1) % interval == 0] for i in range(config["num_hidden_layers"])]
    return config.get("layer_types") or default


def convert_hybrid(name: str, values: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Return the name and the values that llama.cpp expects for a tensor of a model with linear attention.

    It multiplies by a norm's weights as they are, so 1 is added to those that the model adds 1 to. It reads -exp(A_log)
    in place of A_log. It pairs value head i with key head i modulo their number, so the key heads' value heads take
    turns.
    """
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, values + 1
    if "linear_attn" not in name or name.endswith("norm.weight"):
        return name, values
    if name.endswith("A_log"):
        values = -np.exp(values)
    key_heads = config["linear_num_key_heads"]
    value_heads = config["linear_num_value_heads"]
    heads = np.arange(value_heads).reshape(key_heads, -1).T.reshape(-1)
    dim = config["linear_value_head_dim"]
    columns = (heads[:, None] * dim + np.arange(dim)).reshape(-1)
    num_keys = 2 * key_heads * config["linear_key_head_dim"]
    if "out_proj" in name:
        return name, values[:, columns]
    if "in_proj_qkv" in name or "conv1d" in name:
        values = values.reshape(len(values), -1)  # a convolution has an axis of one input channel
        return name, np.concatenate((values[:num_keys], values[num_keys:][columns]))
    return name, values[columns if "in_proj_z" in name else heads]


class Sequence:
    def __init__(self, slot: int, prompt: list[int], output_len: int) -> None:
        self.slot = slot
        self.pending = prompt
        """Tokens that are not in the cache yet: the rest of the prompt, later the token that was just sampled."""
        self.num_computed = 0
        self.num_left = output_len


class Batch:
    """llama.cpp's batch of tokens, filled through numpy."""

    def __init__(self) -> None:
        self.raw = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        view = np.ctypeslib.as_array
        size = (BATCH_TOKENS,)
        self.token = view(self.raw.token, size)
        self.pos = view(self.raw.pos, size)
        self.logits = view(self.raw.logits, size)
        view(self.raw.n_seq_id, size)[:] = 1

    def clear(self) -> None:
        self.raw.n_tokens = 0

    @property
    def room(self) -> int:
        return BATCH_TOKENS - self.raw.n_tokens

    def add(self, sequence: Sequence) -> int | None:
        """Add as many of its tokens as fit. Return the row of its last token, or None if that did not fit."""
        tokens = sequence.pending[: self.room]
        begin = self.raw.n_tokens
        end = self.raw.n_tokens + len(tokens)
        self.token[begin:end] = tokens
        self.pos[begin:end] = np.arange(sequence.num_computed, sequence.num_computed + len(tokens))
        self.logits[begin:end] = 0
        for row in range(begin, end):
            self.raw.seq_id[row][0] = sequence.slot
        sequence.num_computed += len(tokens)
        sequence.pending = sequence.pending[len(tokens) :]
        self.raw.n_tokens = end
        if sequence.pending:
            return None
        self.logits[end - 1] = 1
        return end - 1


def load(spec: dict[str, Any], mode: str) -> Engine:
    source = TYPES[spec["dtype"]]
    has_small_cache = mode == "kv_q8_0"
    kind = source if mode in ("", *FLASH) else mode.upper()
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(print_errors, None)
    path = Path(spec["model"])
    if path.is_dir():
        places = (path, Path(spec["exports"]), kind)
        path = export(*places) if kind == source else quantize(*places, source)
    elif kind != source:
        raise CannotRun(f"{path.name} has the types that it has: only checkpoints become {kind}")
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        reason = errors[0].strip() if errors else "it gives no reason"
        raise CannotRun(f"llama.cpp does not load {path}: {reason}")
    lens = [len(p) + n for p, n in zip(spec["workload"]["prompts"], spec["workload"]["output_lens"], strict=True)]
    num_slots = min(len(lens), spec["max_num_seqs"], llama_cpp.llama_max_parallel_sequences())
    cache = "Q8_0" if has_small_cache else "F32" if kind == "F32" else "F16"
    params = llama_cpp.llama_context_default_params()
    if mode in FLASH:
        params.flash_attn_type = getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{FLASH[mode]}")
    params.n_ctx = num_slots * (-(-max(lens) // 256) * 256)
    params.n_batch = BATCH_TOKENS
    params.n_seq_max = params.n_outputs_max = num_slots
    if spec.get("scores"):
        params.n_outputs_max = max(lens)
    params.n_threads = params.n_threads_batch = spec["threads"]
    params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{cache}")
    params.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise CannotRun(f"llama.cpp makes no context of {params.n_ctx} tokens")
    sampler = make_sampler(spec["temperature"])
    batch = Batch()

    def run(workload: dict[str, Any]) -> int:
        return decode(context, sampler, batch, workload, num_slots)

    def measure_depth(counts: list[int]) -> list[DepthTimes]:
        prompt = spec["workload"]["prompts"][0]
        return measure(context, sampler, batch, prompt, counts, spec["depth"]["num_decodes"])

    num_bytes = llama_cpp.llama_model_size(model) / llama_cpp.llama_model_n_params(model)
    activations = "activations 8 bits, " if num_bytes < 2 else ""
    weights = f"weights {kind}" if path != Path(spec["model"]) else "weights as in the file"
    note = f"{weights}, {num_bytes:.2f} bytes each, {activations}KV {cache}"
    return Engine(run, note, measure_depth, lambda prompt: score(context, batch, prompt))


def make_sampler(temperature: float) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if temperature:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(0))
    else:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
    return chain


def decode(context: Any, sampler: Any, batch: Batch, workload: dict[str, Any], num_slots: int) -> int:
    """Run the workload with continuous batching over the slots. Return the number of generated tokens.

    The requests with the longest outputs get the lowest slots, so that the highest slots become free first. llama.cpp
    computes sequences together only if their slots follow each other; it reads the weights once more for each gap.
    """
    waiting = deque(sorted(zip(workload["output_lens"], workload["prompts"], strict=True), key=lambda r: -r[0]))
    memory = llama_cpp.llama_get_memory(context)
    free = list(range(num_slots))
    running: list[Sequence] = []
    num_tokens = 0
    while waiting or running:
        while waiting and free:
            output_len, prompt = waiting.popleft()
            running.append(Sequence(free.pop(0), prompt, output_len))
        running.sort(key=lambda sequence: (sequence.num_computed == 0 or len(sequence.pending) > 1, sequence.slot))
        batch.clear()
        rows = [(sequence, batch.add(sequence)) for sequence in running if batch.room]
        if status := llama_cpp.llama_decode(context, batch.raw):
            raise RuntimeError(f"llama_decode returned {status}")
        for sequence, row in rows:
            if row is None:
                continue
            sequence.pending = [llama_cpp.llama_sampler_sample(sampler, context, row)]
            sequence.num_left -= 1
            num_tokens += 1
            if not sequence.num_left:
                llama_cpp.llama_memory_seq_rm(memory, sequence.slot, -1, -1)
                running.remove(sequence)
                free = sorted([*free, sequence.slot])
    return num_tokens


def measure(
    context: Any, sampler: Any, batch: Batch, prompt: list[int], counts: list[int], num_decodes: int
) -> list[DepthTimes]:
    """Compute the prompt once, copy its keys and values to all sequences, and decode with each number of sequences."""
    memory = llama_cpp.llama_get_memory(context)

    def step(sequences: list[Sequence]) -> float:
        """Run one step, sample for each sequence whose tokens are all computed, and return the seconds."""
        since = time.perf_counter()
        batch.clear()
        rows = [(sequence, batch.add(sequence)) for sequence in sequences]
        if status := llama_cpp.llama_decode(context, batch.raw):
            raise RuntimeError(f"llama_decode returned {status}")
        for sequence, row in rows:
            if row is not None:
                sequence.pending = [llama_cpp.llama_sampler_sample(sampler, context, row)]
        return time.perf_counter() - since

    first = Sequence(0, prompt, 0)
    seconds = 0.0
    while first.num_computed < len(prompt):
        seconds += step([first])
    for slot in range(1, max(counts)):
        llama_cpp.llama_memory_seq_cp(memory, 0, slot, -1, -1)
    found: list[DepthTimes] = []
    for n in counts:
        sequences = [Sequence(slot, first.pending, 0) for slot in range(n)]
        for sequence in sequences:
            llama_cpp.llama_memory_seq_rm(memory, sequence.slot, len(prompt), -1)
            sequence.num_computed = len(prompt)
        steps = [step(sequences) for _ in range(num_decodes)]
        found.append({"prompt_seconds": seconds if n == 1 else None, "step_seconds": steps})
    return found


def score(context: Any, batch: Batch, prompt: list[int]) -> list[float]:
    """Return the log-probability of each token of a prompt but the first. The prompt fits into one batch."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch.clear()
    batch.add(Sequence(0, prompt, 0))
    batch.logits[: len(prompt)] = 1
    if status := llama_cpp.llama_decode(context, batch.raw):
        raise RuntimeError(f"llama_decode returned {status}")
    num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    found = []
    for row, token in enumerate(prompt[1:]):
        raw = llama_cpp.llama_get_logits_ith(context, row)
        logits = np.ctypeslib.as_array(raw, (num_tokens,)).astype(np.float64)
        largest = logits.max()
        found.append(float(logits[token] - largest - np.log(np.exp(logits - largest).sum())))
    return found


if __name__ == "__main__":
    main(load, {"llama-cpp": llama_cpp.__version__})
