"""What columnar bytes buy: a batch of token ids to a teacher and its values back, against the obvious way.

128 rows of 256 prompt and 1024 response tokens, the sampled values alone and with the top 64 of each position.
  obvious  a pickled dict of Python lists for each row, over zmq REQ/REP, one after the other; lists of values back;
  ours     opd.teacher_server and TeacherClient.score, with every check that they make.

The teacher's own work is next to nothing on both sides (instant_scorer.py, values in a table). Both end with numpy
arrays in the caller's process, the last ones compared with the table after each round. Rounds interleave the two sides,
with five batches after one another for each; the ratio is of medians of wall-clock time of one batch. `first` is the
median of the first batches alone: after a pause all processes sleep and their caches are cold. Ours sends sampled-only
batches as one request. Pickle is used here and nowhere else: it is what is compared with.

    python bench/wire.py --rounds 7
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import ENV, print_result, servers
from instant_scorer import MAX_TOPK, OFFSETS, VOCAB, load

from opd.client import TeacherClient
from opd.scoring.scorer import LoadOptions, Row
from opd.serving.memory import keep_freed_memory

ROWS, PROMPT, RESPONSE, TOPK, PER_PROMPT = 128, 256, 1024, 64, 8
BATCHES = 5  # in a round, for each side
Batch = tuple[list[np.ndarray], list[int]]
Values = list[tuple[np.ndarray, ...]]


def make_batch() -> Batch:
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(ROWS // PER_PROMPT):
        prompt = rng.integers(MAX_TOPK, VOCAB, PROMPT)
        rows += [np.concatenate([prompt, rng.integers(MAX_TOPK, VOCAB, RESPONSE)]) for _ in range(PER_PROMPT)]
    return [row.astype(np.int32) for row in rows], [PROMPT] * ROWS


def obvious_server(topk: int) -> None:
    """Answers pickled rows with pickled lists; the last line of its stdout is where."""
    scorer = load(LoadOptions(model="", max_topk=topk))
    socket = zmq.Context().socket(zmq.REP)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    while True:
        question = pickle.loads(socket.recv())
        row = Row(np.array(question["ids"], np.int32), question["start"])
        scores = scorer.score([row], topk=question["topk"])[0]
        answer = {"logprobs": scores.logprobs.tolist()}
        if scores.topk_ids is not None and scores.topk_logprobs is not None:
            answer |= {"topk_ids": scores.topk_ids.tolist(), "topk_logprobs": scores.topk_logprobs.tolist()}
        socket.send(pickle.dumps(answer))


def obvious(socket: zmq.Socket, batch: Batch, topk: int) -> Values:
    values: Values = []
    for ids, start in zip(*batch, strict=True):
        socket.send(pickle.dumps({"ids": ids.tolist(), "start": start, "topk": topk}))
        answer = pickle.loads(socket.recv())
        arrays = [np.array(answer["logprobs"], np.float32)]
        if topk:
            arrays += [np.array(answer["topk_ids"], np.int32), np.array(answer["topk_logprobs"], np.float32)]
        values.append(tuple(arrays))
    return values


def ours(client: TeacherClient, batch: Batch, topk: int) -> Values:
    scores = client.score(*batch, topk=topk, timeout_s=60.0)
    columns = [scores.logprobs, scores.topk_ids, scores.topk_logprobs]
    return list(zip(*(column for column in columns if column is not None), strict=True))


def compare(topk: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each batch of each round, by side."""
    batch = make_batch()
    table = load(LoadOptions(model="", max_topk=topk))
    expected = table.score([Row(*row) for row in zip(*batch, strict=True)], topk=topk)
    # one batch to the worker for each request, as with a teacher whose batches are large
    arguments = ["--backend", "instant_scorer", "--model", "table", "--max-topk", str(topk), "--max-tokens", "1000000"]
    command = [sys.executable, __file__, "--obvious-server", str(topk)]
    seconds: dict[str, list[list[float]]] = {"obvious": [], "ours": []}
    with (
        servers(1, *arguments) as (addresses, _),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV) as other,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
        TeacherClient(addresses, max_tokens_per_request=ROWS * (PROMPT + RESPONSE)) as client,
    ):
        try:
            assert other.stdout is not None
            socket.linger = 0
            socket.connect(other.stdout.readline().strip())
            client.wait_until_ready(60.0)
            sides: dict[str, Callable[[], Values]] = {
                "obvious": lambda: obvious(socket, batch, topk),
                "ours": lambda: ours(client, batch, topk),
            }
            for number in range(rounds + 1):
                for side, run in sides.items():
                    took, values = [], []
                    for _ in range(BATCHES):
                        values.clear()
                        began = time.perf_counter()
                        values = run()
                        took.append(time.perf_counter() - began)
                    for got, want in zip(values, expected, strict=True):
                        for mine, right in zip(got, want[: len(got)], strict=True):
                            assert np.array_equal(mine, right), f"{side}: wrong values"
                    del got, mine
                    if number:  # the first round warms up
                        seconds[side].append(took)
        finally:
            other.kill()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of each case (default 7)")
    parser.add_argument("--obvious-server", type=int, metavar="TOPK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # all processes: a server of ours does so, and a trainer has, once glibc has seen it free a large block
    keep_freed_memory()
    if args.obvious_server is not None:
        obvious_server(args.obvious_server)
        return
    assert OFFSETS < VOCAB
    result = {}
    print(f"{ROWS} rows, {PROMPT} + {RESPONSE} tokens{'':8}{'obvious ms':>14}{'ours ms':>12}{'ratio':>9}")
    for name, topk in {"sampled": 0, f"top{TOPK}": TOPK}.items():
        seconds = compare(topk, args.rounds)
        ms = {side: 1000 * median(itertools.chain(*times)) for side, times in seconds.items()}
        first = {side: 1000 * median(took for took, *_ in times) for side, times in seconds.items()}
        result[f"ratio_{name}"] = round(ms["obvious"] / ms["ours"], 1)
        result[f"ms_{name}"] = {side: round(value, 2) for side, value in ms.items()}
        result[f"ms_{name}_first"] = {side: round(value, 2) for side, value in first.items()}
        print(f"{name:34}{ms['obvious']:>14.1f}{ms['ours']:>12.1f}{result[f'ratio_{name}']:>9.1f}")
    print_result("wire", **result, rounds=args.rounds, rows=ROWS, prompt=PROMPT, response=RESPONSE)


if __name__ == "__main__":
    main()
