"""Serve a language model over HTTP: streamed text, one state of constant size per client.

    pip install -e '.[language,hf]'
    python examples/server.py primal-lm-tiny --port 8000
    curl -N localhost:8000/generate -d '{"client": "me", "text": "The river", "tokens": 50}'

The model is a name or the folder of a run, as for `primal generate`. The server stores the streaming state of each
client. The next request of a client continues its text and reads only what is new.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

import torch

from primal_attention.cli.generate import load_model
from primal_attention.models.lm import LanguageModel, Sampling, Stream, choose

MAX_CLIENTS = 1000  # the oldest state is dropped beyond it
MAX_BYTES = 2**20
INCOMPLETE = "\ufffd"  # decoded from bytes that are not a whole character yet


class Client:
    """A stream of the model, the tokens that it has not read yet, and a lock: one request at a time."""

    def __init__(self, model: LanguageModel, first: int) -> None:
        self.stream, self.unread, self.lock = Stream(model), [first], threading.Lock()


class Server(ThreadingHTTPServer):
    """One thread per connection. The model is shared and only read; each client has its own state."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], run: str) -> None:
        super().__init__(address, Handler)
        self.model, self.vocabulary = load_model(run)
        self.clients: OrderedDict[str, Client] = OrderedDict()
        self.lock = threading.Lock()

    def client(self, name: str) -> Client:
        with self.lock:
            self.clients[name] = client = self.clients.pop(name, None) or Client(self.model, self.vocabulary.end)
            while len(self.clients) > MAX_CLIENTS:
                self.clients.popitem(last=False)
            return client

    @torch.no_grad()
    def generate(self, client: Client, text: str, count: int, sampling: Sampling) -> Iterator[str]:
        """Read the text, then yield pieces of its continuation, to the end of the document at most."""
        end = None if self.vocabulary.is_word_level else self.vocabulary.end
        generator = torch.Generator().manual_seed(sampling.seed)
        tokens = self.vocabulary.encode([text])[0]
        decoded = self.vocabulary.decode(tokens)
        unread, shown = client.unread + tokens, len(decoded)
        for _ in range(count):
            logits = client.stream.read(torch.tensor([unread]), None)
            unread = client.unread = choose(logits, sampling, generator).tolist()
            if unread[0] == end:
                break
            tokens += unread
            decoded = self.vocabulary.decode(tokens)
            if not decoded.endswith(INCOMPLETE):
                yield decoded[shown:]
                shown = len(decoded)
        yield decoded[shown:]


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # for chunked answers

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", 0))
            if self.path != "/generate" or not 0 < length <= MAX_BYTES:
                raise ValueError(f"POST /generate takes JSON of at most {MAX_BYTES} bytes")
            request: dict[str, Any] = json.loads(self.rfile.read(length))
            client, text = self.server.client(str(request["client"])), str(request["text"])
            sampling = Sampling(float(request.get("temperature", 0.0)), seed=int(request.get("seed", 0)))
            with client.lock:
                pieces = self.server.generate(client, text, int(request.get("tokens", 50)), sampling)
                first = next(pieces)  # reads the prompt: its errors come before the answer
                self.answer(200, "Transfer-Encoding", "chunked")
                for piece in filter(None, chain([first], pieces)):  # an empty chunk would end the answer
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece.encode()), piece.encode()))
                self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:  # the client left; its state stays
            self.close_connection = True
        except (ValueError, KeyError, TypeError) as error:
            self.close_connection = True
            message = f"{type(error).__name__}: {error}\n".encode()
            self.answer(400, "Content-Length", str(len(message)))
            self.wfile.write(message)

    def answer(self, code: int, header: str, value: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header(header, value)
        self.end_headers()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of a finished run, or the name of a model that the package includes")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args()
    server = Server(("127.0.0.1", options.port), options.run)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
