"""The command `nanovllm`. Each subcommand imports what it needs when it runs, so that `--help` answers at once."""

import argparse
import difflib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.apps.jobs.job import DEFAULTS, SHARD_FORMATS, STATUS_HELP, Job, ShardOptions, Status
from nanovllm.apps.ray import guard as ray_guard
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_choice, as_integer, refuse
from nanovllm.version import __version__

_STDOUT = "standard output"
"""The name that the errors of standard output have in place of a file's."""

_ENGINE_FIELDS = {field.name: field for field in fields(EngineConfig)}


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command with one line. argparse would list all options."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"(?:invalid choice: |unrecognized arguments: )'?([^' =]+)'?", message):
            choices = [name for action in self._actions for name in (*action.option_strings, *(action.choices or ()))]
            if near := difflib.get_close_matches(wrong[1], choices, n=1):
                message = f"{wrong[0]}: did you mean {near[0]}?"
        self.exit(int(Status.USAGE), f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    _set_up_logging()
    parser = _Parser("nanovllm", description="Offline inference of Qwen, Llama, Mistral and most other models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_chat(commands)
    _add_run_batch(commands)
    _add_teach(commands)
    _add_bench(commands)
    _add_estimate(commands)
    _add_view(commands)
    _add_eval(commands)
    _add_run(commands)
    _add_doctor(commands)
    options, others = parser.parse_known_args(arguments)
    if others and options.run not in (_eval, _bench):
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(others)}")
    options.others = others
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    except ValueError as error:
        logging.getLogger(__name__).error("%s", error)
        return Status.USAGE


def run() -> NoReturn:
    """Run the command of this process, and end the process with its status.

    After Ctrl-C or SIGTERM the interpreter's clean-up is left out. By then all is closed that this package opened, and
    to take torch and transformers to pieces lasts up to seconds on a busy machine. It is also left out in the process
    that works on Ray, whose clean-up might crash and so hide the status.
    """
    _open_closed_streams()
    is_child = ray_guard.enter_child()
    arguments = sys.argv[1:]
    if arguments[:1] != ["run"]:  # a script has Python's own stream
        sys.stdout = _open_output()
    on_ray = any(argument.split("=")[0] == "--ray" for argument in arguments)
    needs_guard = arguments[:1] == ["run-batch"] and on_ray and not {"-h", "--help"} & {*arguments}
    try:
        try:
            status = ray_guard.run_in_child(arguments) if needs_guard and not is_child else main()
        finally:  # --help ends main() by SystemExit
            sys.stdout.flush()
    except OSError as error:
        if error.filename != _STDOUT:
            raise
        status = _give_up_output(error)
    if is_child or status in (Status.INTERRUPTED, Status.TERMINATED):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader may have gone, or it may be closed
                stream.flush()
        os._exit(status + ray_guard.REPORTED if is_child else status)
    sys.exit(status)


def _open_closed_streams() -> None:
    """Put something in the place of standard streams that are closed, or the next file that is opened would be one.

    A closed input becomes an empty one. A closed output becomes one that cannot be written, so that no answer is lost
    without a word.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)  # takes the lowest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


class _OutputFile(io.FileIO):
    """The descriptor of standard output. Its errors in writing have its name, so that no other is taken for them."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


def _open_output() -> io.TextIOWrapper:
    """Return a stream like sys.stdout, whose errors can be told from those of other files."""
    old: Any = sys.stdout  # a TextIOWrapper
    raw = _OutputFile(1, "w", closefd=False)
    is_unbuffered = old.write_through
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=bool(old.line_buffering),
        write_through=is_unbuffered,
    )


def _give_up_output(error: OSError) -> Status:
    """Say why standard output cannot be written, unless its reader has gone, and return the status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there
    if not isinstance(error, BrokenPipeError):
        logging.getLogger(__name__).error("standard output cannot be written: %s", error.strerror or error)
    return Status.OUTPUT_FAILED


def _set_up_logging() -> None:
    """Send what this package logs to stderr. Other packages are left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("nanovllm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the conversation, and /new "
        "starts another one.",
    )
    parser.add_argument("model", help=_help("model"))
    parser.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: what --max-model-len leaves)"
    )
    add_engine_options(parser, without=("model", "max_num_seqs", "data_parallel_size"))
    parser.set_defaults(run=_chat, max_num_seqs=1)


def _chat(options: argparse.Namespace) -> int:
    from nanovllm.apps.chat import chat

    changes: dict[str, float | None] = {"max_tokens": options.max_tokens}
    if options.temperature is not None:
        changes["temperature"] = options.temperature
    return chat(read_engine_config(options), options.system, changes)


def _add_run_batch(commands: Any) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        description="Answer a file of requests. A line has OpenAI's batch format, or is "
        '{"prompt": ...} or {"messages": ...}.\n'
        "After a crash, the same command resumes the job.",
        epilog="exit status:\n" + "\n".join(f"  {status.value:3}  {text}" for status, text in STATUS_HELP.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-i",
        "--input-file",
        required=True,
        metavar="PATH",
        help='file of requests, one per line, or a folder of such files; gzip is unpacked; "-" is stdin',
    )
    add(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help='file of results, in the order in which they end; "-" is stdout',
    )
    add("--overwrite", action="store_true", help="start anew: throw away what the output file holds")
    add("--accept-changes", action="store_true", help="resume even if options or the engine differ from before")
    add("--served-model-name", metavar="NAME", help='the only "model" that lines may ask for (default: --model)')
    add("--stats", metavar="FILE", help="write the summary to this file, as JSON")
    add(
        "--reuse",
        metavar="FILE",
        action="append",
        default=[],
        help="copy answers from the results of an earlier job, where the request and all that decides its answer are "
        "the same; may be given several times",
    )
    add("--reuse-close", action="store_true", help="reuse even if the engine does not promise the same bits")
    add(
        "--top-logprobs-file",
        metavar="DIR",
        help="folder of shards, as teach writes them: the most likely tokens in the place of each generated one",
    )
    add(
        "--top-logprobs-count",
        type=int,
        default=ShardOptions.top,
        metavar="K",
        help=f"how many tokens to write for each place (default: {ShardOptions.top})",
    )
    _add_shard_options(parser, ShardOptions.tokens)
    add("--model", required=True, help=_help("model"))
    add("--data-parallel-size", "--replicas", type=int, default=1, metavar="N", help=_help("data_parallel_size"))
    add(
        "--ray",
        type=int,
        nargs="?",
        const=0,
        metavar="ACTORS",
        help="run on the Ray cluster at RAY_ADDRESS, or on one of this machine alone; needs ray[data]. So many actors "
        "share the replicas; those of an actor are on one machine (default: an actor for each replica)",
    )
    group = parser.add_argument_group(
        "sampling", "Values for lines that do not say otherwise, as a line would have them: text, or else JSON."
    )
    for name in DEFAULTS:
        group.add_argument(f"--{name.replace('_', '-')}", type=json_or_text, metavar="VALUE")
    add_engine_options(parser, without=("model", "data_parallel_size"))
    parser.set_defaults(run=_run_batch)


def _run_batch(options: argparse.Namespace) -> int:
    from nanovllm.apps.jobs.run import run_job

    given = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    SamplingParams(**given)  # raises a ValueError for a value that is wrong in every line
    job = Job(
        input=options.input_file,
        output=options.output_file,
        config=read_engine_config(options),
        model_name=options.served_model_name or options.model,
        overwrite=options.overwrite,
        stats=options.stats,
        accept_changes=options.accept_changes,
        sampling=given,
        reuse=options.reuse,
        reuse_close=options.reuse_close,
        shards=_read_shard_options(options),
    )
    if options.ray is None:
        return run_job(job)
    if options.reuse:
        raise refuse(", ".join(options.reuse), "--reuse", "left out with --ray, whose engines see no results")
    if job.shards is not None:
        raise refuse(job.shards.folder, "--top-logprobs-file", "left out with --ray, whose engines send no arrays")
    try:
        from nanovllm.apps.ray.cluster import run_on_ray
    except ImportError as error:
        raise ValueError(f"--ray needs Ray Data: pip install 'ray[data]' ({error})") from error
    return run_on_ray(job, options.ray)


def _add_shard_options(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Let a command have the options of the shards that it writes.

    Args:
        tokens: the default of --shard-tokens.
    """
    add = parser.add_argument
    add("--shard-format", "--format", choices=SHARD_FORMATS, default=ShardOptions.format, help="parquet needs pyarrow")
    add(
        "--logprobs-dtype",
        choices=("float16", "float32"),
        default=ShardOptions.logprobs_dtype,
        help="type of the log-probabilities in the shards (default: float16); --dtype is the model's",
    )
    add(
        "--shard-tokens",
        type=int,
        default=tokens,
        metavar="N",
        help=f"a shard ends with the line that gives it so many tokens (default: {tokens})",
    )


def _read_shard_options(options: argparse.Namespace) -> ShardOptions | None:
    """Return the shards that `run-batch` writes beside the results; None if it writes none."""
    read = ShardOptions(
        folder=options.top_logprobs_file or "",
        top=options.top_logprobs_count,
        format=options.shard_format,
        logprobs_dtype=options.logprobs_dtype,
        tokens=options.shard_tokens,
    )
    if options.top_logprobs_file is not None:
        return read
    if read != ShardOptions(""):
        raise ValueError("options of shards need --top-logprobs-file, which names their folder")
    return None


def _add_teach(commands: Any) -> None:
    parser = commands.add_parser(
        "teach",
        help="write what a model expects in texts, for a smaller model to learn from",
        description="Write, for each token of each text, the most likely tokens and their log-probabilities. A line is "
        'one that run-batch reads: its "prompt", "text", or "messages" through the chat template.\n'
        "After a crash, the same command goes on after the last shard.",
        epilog="exit status:\n" + "\n".join(f"  {status.value:3}  {text}" for status, text in STATUS_HELP.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-i", "--input", required=True, metavar="PATH", help="file of texts, one per line, or a folder of such files")
    add(
        "-o", "--output", required=True, metavar="DIR", help="folder of the shards, which are in the order of the lines"
    )
    add("--model", required=True, help=_help("model"))
    add("--top", type=int, default=64, metavar="K", help="how many tokens to write for each place (default: 64)")
    add(
        "--assistant-only",
        action="store_true",
        help="of a conversation, only what the assistant says counts: the mask tells it",
    )
    _add_shard_options(parser, tokens=1 << 17)
    add("--overwrite", action="store_true", help="start anew: remove the shards in the folder")
    add("--accept-changes", action="store_true", help="resume even if options or the engine differ from before")
    add("--served-model-name", metavar="NAME", help='the only "model" that lines may ask for (default: --model)')
    add("--stats", metavar="FILE", help="write the summary to this file, as JSON")
    add_engine_options(parser, without=("model", "data_parallel_size"))
    parser.set_defaults(run=_teach)


def _teach(options: argparse.Namespace) -> int:
    from nanovllm.apps.teach.run import TeachJob, run_teach_job

    job = TeachJob(
        input=options.input,
        output=options.output,
        config=read_engine_config(options),
        model_name=options.served_model_name or options.model,
        top=options.top,
        format=options.shard_format,
        logprobs_dtype=options.logprobs_dtype,
        only_assistant=options.assistant_only,
        shard_tokens=options.shard_tokens,
        overwrite=options.overwrite,
        accept_changes=options.accept_changes,
        stats=options.stats,
    )
    return run_teach_job(job)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure throughput beside the least time", add_help=False)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from nanovllm.apps import bench

    parser = _Parser("nanovllm bench", description=bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_options(parser)
    command = " ".join(["nanovllm", "bench", *options.others])
    bench.measure(bench.read_options(parser, options.others), {"command": command})
    return 0


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="tell whether a model fits, and the least time of a job",
        description="Tell from config.json alone whether a model fits into a GPU, or into a CPU's memory, and how many "
        "tokens of KV cache. With --input, tell the tokens, the steps and the least time of a job, too.",
        epilog="exit status: 0 if one sequence of --max-model-len fits, 1 if not, 2 for a wrong option",
    )
    add = parser.add_argument
    add("model", help="a folder, a config.json, a Hugging Face id, or a shape such as qwen3-8b")
    add(
        "--memory",
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU, such as 80GB or 80 (both mean 80 GiB), or in bytes; with --device cpu, of the machine "
        "(default: what is free here)",
    )
    add("--machine", metavar="NAME", help="h100, h200, a100, l4, rtx4090, laptop or server: its memory and speed")
    add("--input", metavar="PATH", help="a job's requests: their least time on --machine, or else on this machine")
    add("--max-tokens", type=int, metavar="N", help="most tokens of answers whose lines do not say it")
    add(
        "--typical-output",
        type=int,
        default=256,
        metavar="N",
        help="tokens at which answers end in the job's second estimate, unless they must end before (default: 256)",
    )
    weights = ("tensor_parallel_size", "pipeline_parallel_size", "dtype", "quantization", "kv_cache_dtype")
    sizes = ("kvcache_block_size", "max_num_seqs", "max_num_batched_tokens", "kvcache_memory_bytes")
    for name in ("tokenizer", "device", "max_model_len", "model_impl", *weights, "gpu_memory_utilization", *sizes):
        _add_engine_option(parser, name)
    parser.set_defaults(run=_estimate)


def _estimate(options: argparse.Namespace) -> int:
    from nanovllm.apps.estimate import estimate, estimate_job, fetch_config, parse_size
    from nanovllm.apps.floor import MACHINES, Machine

    config = read_engine_config(options)
    hf_config = fetch_config(options.model, config.model_impl)
    typical = as_integer(options.typical_output, "--typical-output", 1)
    memory = parse_size(options.memory) if options.memory is not None else None
    machine = None
    if options.machine is not None:
        device, gib, gb, tflop = MACHINES[as_choice(options.machine, "--machine", MACHINES)]
        config = replace(config, device=device)
        memory = gib << 30 if memory is None else memory
        machine = Machine(gb * 1e9, gb * 1e9, tflop * 1e12)
    estimated = estimate(hf_config, config, memory)
    sys.stdout.write(estimated.describe() + "\n")
    if options.input is not None:
        defaults = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
        sys.stdout.write(estimate_job(options.input, hf_config, estimated, machine, defaults, typical) + "\n")
    return 0 if estimated.fits else 1


def _add_view(commands: Any) -> None:
    parser = commands.add_parser(
        "view",
        help="look at a run, step by step, in a browser",
        description="Turn a trace, which the option trace records, into one page for a browser. It shows the steps, "
        "the KV blocks with their owners, and the life of each request. With two traces, it shows both runs side by "
        "side, step by step.",
    )
    parser.add_argument("trace", type=Path, metavar="RUN.json", help="the file that the option trace recorded")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER.json", help="a second run, to compare")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page to write (default: the trace's name, with .html)"
    )
    parser.set_defaults(run=_view)


def _view(options: argparse.Namespace) -> int:
    from nanovllm.apps.view.page import write_page

    output = options.output or options.trace.with_suffix(".html")
    recording = write_page(options.trace, output, options.other)
    sys.stdout.write(f"{output}: {recording.num_steps} steps; open it in a browser\n")
    return 0


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate a model with lm-evaluation-harness",
        description="Evaluate a model with lm-evaluation-harness; needs the package lm_eval.",
        usage="nanovllm eval --model MODEL [NAME=VALUE ...] --tasks TASK [...]",
        epilog="NAME=VALUE sets an option of LLM, such as dtype=float32. All else goes to the harness: see lm-eval run "
        "--help.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help=_help("model"))
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    try:
        from nanovllm.apps.lm_eval import run_harness
    except ImportError as error:
        raise ValueError(str(error)) from error
    run_harness(options.model, options.others)
    return 0


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script that imports vllm, on this engine",
        description="Run a script, or with -m a module: vllm is this engine there, and in processes that it starts.",
        usage="nanovllm run [--replace] [--claim VERSION] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    parser.add_argument("--replace", action="store_true", help="do so even if vLLM itself is installed")
    parser.add_argument("--claim", metavar="VERSION", help="the version of vLLM that programs see (default: 0.30.0)")
    parser.add_argument("-m", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> NoReturn:
    from nanovllm.apps.standin.environment import VERSION, prepare_children

    command = ["-m", *options.m] if options.m else options.script
    if not command:
        raise ValueError("nanovllm run needs a script: nanovllm run script.py")
    prepare_children(options.claim or VERSION, options.replace)
    os.execv(sys.executable, [sys.executable, *command])


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="describe this machine, for a bug report",
        description="Print what a bug report needs: versions, processor, threads, compiler, memory, and which backend "
        "runs a model here, with the reason.",
    )
    parser.add_argument(
        "model", nargs="?", default="qwen3-0.6b", help="a folder, an id or a shape (default: the shape qwen3-0.6b)"
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from nanovllm.apps.doctor import describe

    sys.stdout.write(describe(options.model) + "\n")
    return 0


def read_engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the options of an engine among those of a command line; ValueError if one of them is wrong."""
    given = {name: value for name, value in vars(options).items() if name in _ENGINE_FIELDS and name != "model"}
    config = EngineConfig.from_options(options.model, given)
    if config.speculative_config is not None:  # an engine checks it when it is loaded, and a job has files by then
        from nanovllm.features.drafts.options import read_speculative_config

        read_speculative_config(config.speculative_config)
    return config


def add_engine_options(parser: argparse.ArgumentParser, without: Collection[str]) -> None:
    """Add all options of EngineConfig but a few, in a group of their own."""
    group = parser.add_argument_group("engine options")
    for name in _ENGINE_FIELDS:
        if name not in without:
            _add_engine_option(group, name)


def _add_engine_option(parser: Any, name: str) -> None:
    """Add an option of EngineConfig, with its help text. EngineConfig gives options that are absent their defaults."""
    field = _ENGINE_FIELDS[name]
    if field.type in (bool, bool | None):
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        last_word = name.split("_")[-1].upper()
        type_, metavar = _TYPES.get(field.type, (str, _METAVARS.get(name, last_word)))
        kind = {"type": type_, "metavar": metavar}
    parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=_help(name), **kind)


def json_or_text(text: str) -> Any:
    """Return a value that is written as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_TYPES: dict[Any, tuple[Any, str]] = {
    int: (int, "N"),
    float: (float, "SHARE"),
    int | None: (int, "N"),
    int | str: (json_or_text, "N"),
    Mapping[str, Any] | None: (json_or_text, "JSON"),
}
"""For each type of a field that is no string: the reader of its argument, and the argument's name in --help."""
_METAVARS = {"trace": "FILE"}
"""The names of arguments that are strings in --help, where the last word of the field's name would say too little."""


def _help(name: str) -> str:
    field = _ENGINE_FIELDS[name]
    text = str(field.metadata["help"])
    if name != "model":
        text += f" (default: {field.default})"
    return text.replace("%", "%%")
