"""The teacher server: `python -m opd.teacher_server --model DIR` serves log-probs of given token ids.

This process (the front) owns the address and never loads a model; a worker process that it starts, watches and restarts
does. Stop it with SIGTERM, which drains: what was accepted is answered first.

Exit codes: 0 drained after SIGTERM; 1 the worker cannot be brought up; 2 a setting cannot work (address taken, no such
model); 130 after Ctrl-C and 143 after a second SIGTERM, both at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from opd.addresses import MAX_PORT
from opd.deadline import MAX_S
from opd.errors import ConfigError
from opd.scoring.scorer import DTYPES, LoadOptions
from opd.serving.front import Front, Options
from opd.serving.supervisor import EngineFailed, Settings
from opd.wire import Limits, ModelInfo

DEFAULT_BIND = "tcp://127.0.0.1:15555"  # below 32768: a client cannot be given this port as its own by chance


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m opd.teacher_server",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, default=argparse.SUPPRESS, help="model folder, or oracle:seed=1,vocab=1000")
    add(
        "--backend",
        default="hf",
        help="hf (transformers), vllm, http (a vLLM or SGLang server), oracle (for tests), or your own module",
    )
    add("--bind", default=DEFAULT_BIND, help="address to serve on; port 0 takes a free one")
    add("--insecure", action="store_true", help="allow an address that others can reach: no keys, no encryption")
    add("--dtype", default="auto", choices=DTYPES, help="auto: as the model was saved")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--max-len", type=_positive, default=None, help="most ids in one row; None: what the model's config allows")
    add("--max-tokens", type=_positive, default=16_384, help="ids in one batch; bounds the worker's memory")
    add("--max-topk", type=_not_negative, default=256, help="most ids per position in a top-k request")
    add("--tensor-parallel-size", type=_positive, default=1, help="vllm: GPUs that hold the model together")
    add("--gpu-memory-utilization", type=_share, default=0.9, help="vllm: share of each GPU's memory to take")
    add("--url", help="http: address of the vLLM or SGLang server; --model is its name for the model")
    add(
        "--tokenizer", help="http: folder with the tokenizer and config.json, where the server's is not on this machine"
    )
    add("--api-key-env", metavar="NAME", help="http: environment variable that holds the server's key")
    limits = Limits()
    add("--max-request-bytes", type=_positive, default=limits.max_request_bytes, help="larger requests are refused")
    add("--max-reply-bytes", type=_positive, default=limits.max_reply_bytes, help="larger replies are refused at once")
    add("--max-rows", type=_positive, default=limits.max_rows, help="rows in one request")
    add("--max-queued-tokens", type=_positive, default=1 << 25, help="above it clients are told to come back later")
    add("--max-queued-reply-bytes", type=_positive, default=1 << 30, help="the same for the memory of replies")
    add("--cache-mb", type=_not_negative, default=256, help="memory for values to answer again without scoring; 0: off")
    add("--worker-timeout-s", type=_seconds, default=600.0, help="a batch without progress so long: worker restarts")
    add("--load-timeout-s", type=_seconds, default=1800.0, help="longest time to load the model")
    add("--max-start-failures", type=_positive, default=3, help="failed starts in a row before the server gives up")
    add("--metrics-port", type=_port, help="HTTP port for /metrics and /healthz; 0: a free one; None: off")
    add("--metrics-host", default="127.0.0.1", help="address for it; what it shows can be read without a password")
    add("--drain-s", type=_seconds_or_0, default=30.0, help="after SIGTERM: longest time to finish what was accepted")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what is logged to stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.raiseExceptions = False  # a full disk under the log is no reason to stop
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        check_reach(args.bind, insecure=args.insecure)
        front = Front(options_from(args), on_ready=_say_ready)
        address = front.bind()
        metrics = _metrics(args, front)
        if args.insecure:
            logging.warning("--insecure: whoever can reach %s can use this teacher", address)
        _say(f"teacher listening at {address}, loading {args.model}")
        with metrics:
            return front.run()
    except (ConfigError, EngineFailed) as e:
        print(f"teacher_server: error: {e}", file=sys.stderr, flush=True)
        return 2 if isinstance(e, ConfigError) or e.config else 1


def _metrics(args: argparse.Namespace, front: Front) -> contextlib.AbstractContextManager[object]:
    """Take the port of /metrics, if one is wanted; it is answered while the context is entered."""
    if args.metrics_port is None:
        return contextlib.nullcontext()
    from opd.serving.metrics import MetricsServer  # its library costs a tenth of a second and a few megabytes

    server = MetricsServer(args.metrics_host, args.metrics_port, front.counts, front.info)
    _say(f"metrics at {server.url}")
    return server


def options_from(args: argparse.Namespace) -> Options:
    load = LoadOptions(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        max_length=args.max_len,
        max_tokens=args.max_tokens,
        max_topk=args.max_topk,
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        url=args.url,
        tokenizer=args.tokenizer,
        api_key_env=args.api_key_env,
    )
    worker = Settings(
        backend=args.backend,
        load=load,
        worker_timeout_s=args.worker_timeout_s,
        load_timeout_s=args.load_timeout_s,
        max_start_failures=args.max_start_failures,
        log_level=args.log_level,
    )
    limits = Limits(
        max_request_bytes=args.max_request_bytes, max_reply_bytes=args.max_reply_bytes, max_rows=args.max_rows
    )
    return Options(
        bind=args.bind,
        worker=worker,
        limits=limits,
        max_queued_tokens=args.max_queued_tokens,
        max_queued_reply_bytes=args.max_queued_reply_bytes,
        drain_s=args.drain_s,
        cache_bytes=args.cache_mb << 20,
    )


def check_reach(bind: str, *, insecure: bool) -> None:
    """Refuse an address that others can reach, unless the user says that this is meant.

    Raises:
        ConfigError: it is no ZMQ address, or it needs --insecure.
    """
    if bind.startswith("ipc://"):
        return  # a file: its folder's permissions decide
    try:
        host = urlsplit(bind).hostname or ""
    except ValueError:
        host = ""
    port = bind.rpartition(":")[2]
    if not bind.startswith("tcp://") or not host or not (port == "*" or (port.isdecimal() and int(port) <= MAX_PORT)):
        raise ConfigError(f"--bind {bind!r} is no address; give one like {DEFAULT_BIND}")
    if not insecure and not _is_loopback(host):
        raise ConfigError(
            f"--bind {bind} can be reached by other machines, and there are neither keys nor encryption: anyone there "
            f"could use this teacher. Bind tcp://127.0.0.1 and use an ssh tunnel, or add --insecure on a closed network"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an interface: where it leads is not known here


def _say_ready(address: str, info: ModelInfo, seconds: float) -> None:
    _say(
        f"teacher ready at {address}: {info.name}, vocabulary {info.vocab_size}, max length {info.max_length}, "
        f"{info.dtype}, backend {info.backend}, loaded in {seconds:.1f} s"
    )


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens, which is no reason to stop
        print(line, flush=True)


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _seconds(text: str) -> float:
    value = _seconds_or_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _seconds_or_0(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MAX_S:  # NaN fails both
        raise argparse.ArgumentTypeError(f"{text} is no length of time from 0 to {MAX_S:g} seconds")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share above 0 and up to 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port from 0 to {MAX_PORT}")
    return value


if __name__ == "__main__":
    sys.exit(main())
