"""A shop: its catalogue, the server that sells it, customers' wishes, and the value of a purchase.

A product is a combination of kind, colour and material at a price. Each combination is sold at two prices and belongs
to exactly one of three parts: training, held out, or shown to the first model.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import Final, Literal, NamedTuple, TypedDict
from urllib.parse import parse_qs, urlsplit
from zlib import crc32

from typing_extensions import override

Part = Literal["train", "held_out", "shown"]

KINDS: Final = ("shirt", "jacket", "scarf", "hat", "bag", "blanket", "dress", "coat")
COLOURS: Final = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
MATERIALS: Final = ("cotton", "wool", "linen", "silk", "velvet")
SIZES: Final = ("small", "medium", "large")
PHRASES: Final = (
    "I want a {size} {colour} {kind} of {material} for at most {budget}",
    "a {kind} of {colour} {material} in {size} below {budget}",
    "please find a {colour} {material} {kind} in {size} for {budget} or less",
    "{material} {kind} in {colour} and {size} I have {budget}",
)
NOTHING: Final = "nothing found"
_SHOWN: Final = 3


class Product(NamedTuple):
    id: str
    colour: str
    material: str
    kind: str
    price: int
    """Whole dollars."""

    @property
    def title(self) -> str:
        return f"{self.colour} {self.material} {self.kind}"


class Task(TypedDict):
    """A customer's wish in words, and its parts."""

    wish: str
    kind: str
    colour: str
    material: str
    size: str
    budget: int


def catalogue() -> dict[str, Product]:
    """Return the products by id: a cheap and an expensive one of each combination."""
    rng = random.Random("catalogue")
    made = list(product(COLOURS, MATERIALS, KINDS))
    ids = iter(rng.sample(range(100, 1000), 2 * len(made)))
    found: dict[str, Product] = {}
    for colour, material, kind in made:
        cheap = rng.randint(10, 50)
        for price in (cheap, cheap + rng.randint(10, 49)):
            number = str(next(ids))
            found[number] = Product(number, colour, material, kind, price)
    return found


def search(products: dict[str, Product], query: str, at_most: float | None = None) -> list[Product]:
    """Return the three products that match most words, the most expensive first, none above the price."""
    words = set(query.lower().split())
    counted = [(len(words & set(one.title.split())), one.price, one.id) for one in products.values()]
    fitting = [(count, price, id) for count, price, id in counted if count and (at_most is None or price <= at_most)]
    return [products[id] for _, _, id in sorted(fitting, reverse=True)[:_SHOWN]]


def shown(results: list[Product]) -> str:
    return "\n".join(f"{one.id} {one.title} {one.price}" for one in results) or NOTHING


def page(one: Product) -> str:
    return f"{one.title} {one.price} {' '.join(SIZES)}"


def value(task: Task, bought: Product | None, size: str) -> float:
    """Return the share of the wish that a purchase meets, 0 to 1: 0 if the kind is wrong."""
    if bought is None or bought.kind != task["kind"]:
        return 0.0
    met = (
        bought.colour == task["colour"],
        bought.material == task["material"],
        size == task["size"],
        bought.price <= task["budget"],
    )
    return (1 + sum(met)) / (1 + len(met))


def tasks(part: Part) -> list[Task]:
    """Return the tasks of one part, shuffled. Each can be met in full: the budget is enough for the cheap product."""
    rng = random.Random(part)
    cheap: dict[tuple[str, str, str], int] = {}
    for one in catalogue().values():
        key = (one.colour, one.material, one.kind)
        cheap[key] = min(one.price, cheap.get(key, one.price))
    found: list[Task] = []
    for (colour, material, kind), price in cheap.items():
        digit = crc32(f"{colour} {material} {kind}".encode()) % 10
        if part != ("train" if digit < 4 else "held_out" if digit < 6 else "shown"):
            continue
        for size in SIZES:
            budget = price + rng.randint(0, 9)
            said = {"kind": kind, "colour": colour, "material": material, "size": size, "budget": budget}
            wish = rng.choice(PHRASES).format(**said)
            found.append(Task(wish=wish, kind=kind, colour=colour, material=material, size=size, budget=budget))
    rng.shuffle(found)
    return found


@contextmanager
def serve(host: str = "127.0.0.1", port: int = 0) -> Generator[str]:
    """Serve the shop until the context ends, by default on a free port of this machine; yield its address.

    `GET /search?query=red+shirt&at_most=30` and `GET /products/412` return text. `POST /orders` with
    `{"id": "412", "size": "small"}` places an order. Errors (400, 404) state what was wrong.
    `GET /health` responds when the shop is open.
    """
    server = ThreadingHTTPServer((host, port), _Shop)
    thread = threading.Thread(target=server.serve_forever, name="shop", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Shop(BaseHTTPRequestHandler):
    products = catalogue()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/search":
            given = parse_qs(address.query)
            at_most = given.get("at_most", [""])[0]
            try:
                limit = float(at_most) if at_most else None
            except ValueError:
                return self._answer(400, f"at_most must be a number of dollars; got {at_most!r}")
            return self._answer(200, shown(search(self.products, given.get("query", [""])[0], limit)))
        if address.path == "/health":
            return self._answer(200, "open")
        found = self.products.get(address.path.removeprefix("/products/"))
        return self._answer(200, page(found)) if found else self._answer(404, "no such product")

    def do_POST(self) -> None:
        try:
            order = json.loads(self.rfile.read(min(int(self.headers["Content-Length"] or 0), 10_000)))
            id, size = str(order["id"]), order["size"]
        except (ValueError, TypeError, KeyError):
            return self._answer(400, 'an order must be {"id": ..., "size": ...}')
        if self.path != "/orders" or id not in self.products:
            return self._answer(404, "no such product")
        if size not in SIZES:
            return self._answer(400, f"sizes are {', '.join(SIZES)}")
        return self._answer(200, "bought")

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a line per request would hide the output of the training."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1", help="host; 0.0.0.0 for agents on other machines")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # otherwise they end the process immediately
    with serve(options.host, options.port) as address:
        print(f"The shop listens on {address}", flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
