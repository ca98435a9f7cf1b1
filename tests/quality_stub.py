"""A stub of SGLang's /generate that answers from given logits, so that quality can be judged without a server.

World: a synthetic model over a small vocabulary whose logits for each answer position are known; a server sees them
through `noise` and may be made faulty.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from nvfp4lab.server.quality_distance import cut, top1
from nvfp4lab.server.quality_prompts import Prompt
from nvfp4lab.server.quality_reference import REFERENCE_TOP, SERVER_TOP, Floor, Item, Reference

VOCABULARY = 300
CATEGORIES = ("english", "code", "arithmetic", "languages", "multi_turn", "long")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def row(logits: np.ndarray, top: int) -> dict[int, float]:
    return cut(dict(enumerate(log_softmax(logits).tolist())), top)


@dataclasses.dataclass(frozen=True)
class World:
    """logits: [items, positions, VOCABULARY] of the reference."""

    logits: np.ndarray
    reference: Reference
    floor: Floor


def world(seed: int, items: int = 24, positions: int = 12, floor_noise: float = 0.3, lead: float = 0.0) -> World:
    """lead: nats by which one token of each position is raised above the rest's spread."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2.5, (items, positions, VOCABULARY))
    logits[..., 5] += lead
    logits[..., 0] -= 5  # id 0 is no answer
    entries = []
    for number in range(items):
        rows = tuple(row(position, REFERENCE_TOP) for position in logits[number])
        prompt = Prompt(f"p{number}", CATEGORIES[number % len(CATEGORIES)], "text", (7, 1000 + number))
        entries.append(Item(prompt, tuple(map(top1, rows)), "an answer", rows))
    ref = Reference("synthetic", tuple(entries), (299,))
    return World(logits, ref, floor_of(ref, logits + floor_noise * random.normal(size=logits.shape)))


def floor_of(ref: Reference, logits: np.ndarray) -> Floor:
    return Floor.of("synthetic ideal", ref, [[row(position, SERVER_TOP) for position in item] for item in logits])


@dataclasses.dataclass
class Arm:
    """What the stub serves: logits, and hooks that break it. spoil(reply, in_flight) may change a reply in place."""

    world: World
    logits: np.ndarray
    spoil: Callable[[dict, int], None] = lambda reply, in_flight: None
    in_flight: int = 0
    cache: dict = dataclasses.field(default_factory=dict)

    def reply(self, body: dict) -> dict:
        ids, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        number = ids[1] - 1000
        given = ids[2:]
        rows = self._rows(number)
        scored = [[None, ids[1], None]] + [[rows[j].get(token, -20.0), token, None] for j, token in enumerate(given)]
        tops = [None] + [self._entries(rows[j]) for j in range(len(given))]
        written, expected, on_track = [], self.world.reference.items[number].answer_ids, True
        for j in range(len(given), min(len(given) + wanted, len(rows))):
            token = top1(rows[j]) if on_track else 100 + (j * 37 + number) % 150
            written.append((token, rows[j]))
            on_track = on_track and token == expected[j]
        return {
            "text": "an answer",
            "meta_info": {
                "input_token_logprobs": scored,
                "input_top_logprobs": tops,
                "output_token_logprobs": [[rows.get(token, -20.0), token, None] for token, rows in written],
                "output_top_logprobs": [self._entries(rows) for _, rows in written],
                "finish_reason": {"type": "length"},
            },
        }

    def _rows(self, number: int) -> list[dict[int, float]]:
        key = (id(self.logits), number)
        if key not in self.cache:
            self.cache[key] = [row(position, SERVER_TOP) for position in self.logits[number]]
        return self.cache[key]

    @staticmethod
    def _entries(entries: dict[int, float]) -> list:
        return [[value, token, None] for token, value in entries.items()]


@contextlib.contextmanager
def serving(arm: Arm) -> Iterator[str]:
    """Base URL of a server of `arm`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                arm.in_flight += 1
                in_flight = arm.in_flight
            try:
                reply = arm.reply(body)
                arm.spoil(reply, in_flight)
            finally:
                with lock:
                    arm.in_flight -= 1
            raw = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
