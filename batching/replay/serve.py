"""A pool's metrics over HTTP while a replay runs, for Prometheus. Needs the extra `metrics`, and says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from batching.arguments import CommandError, duration
from staging import StagingPool

HOST = "127.0.0.1"
"""Only this machine: the numbers are served without a password."""


class MetricsServer:
    """Serves what is shown to it for as long as its `with` block runs. `CommandError` on entry when it cannot."""

    def __init__(self, port: int, labels: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._labels = labels
        self._over = False
        self._read = threading.Event()
        """Somebody has read the numbers of the end."""

    @property
    def address(self) -> str:
        """Where it is: port 0 has become a free one."""
        return f"http://{HOST}:{self._port}/metrics"

    def show(self, pool: StagingPool) -> None:
        """From now on a scrape reads this pool."""
        self._collector.add(pool)

    def hold(self, seconds: float) -> None:
        """Return when a scrape that began after this call was answered, after `seconds`, or on Ctrl-C. Says so."""
        try:
            self._over = True  # before anybody is told: his scrape may come at once
            print(
                f"replay: metrics stay at {self.address} until they are scraped, {duration(seconds * 1e9)} at the "
                f"most; Ctrl-C ends it sooner",
                file=sys.stderr,
                flush=True,
            )
            self._read.wait(seconds)
        except KeyboardInterrupt:
            print(file=sys.stderr)  # behind the terminal's ^C; what was to be done is done

    def __enter__(self) -> MetricsServer:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app

            from staging.metrics import PoolCollector
        except ImportError as error:
            raise CommandError(
                f"--metrics-port needs the Prometheus client ({error}): pip install 'staging-pool[metrics]'"
            ) from error
        self._collector = PoolCollector(labels=self._labels)
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server = make_server(HOST, self._port, self._watched(make_wsgi_app(registry)), _Server, _Handler)
        except OSError as error:
            raise CommandError(
                f"cannot serve metrics on {HOST}:{self._port}: {error.strerror}; "
                f"choose another --metrics-port, or 0 for a free one"
            ) from error
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _watched(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """The client's app, which also notes when an answer of the end has gone out."""

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            over = self._over  # before the pool is read
            parts = list(app(environ, start_response))
            wanted = over and environ["REQUEST_METHOD"] == "GET" and any(parts)  # a browser's icon is empty
            return _Answer(parts, self._read.set if wanted else None)

        return answer


class _Answer(list[bytes]):
    """The body of an answer. `close` is called by the server when it has been sent."""

    def __init__(self, parts: list[bytes], on_sent: Callable[[], None] | None) -> None:
        super().__init__(parts)
        self._on_sent = on_sent

    def close(self) -> None:
        if self._on_sent is not None:
            self._on_sent()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a client that hangs must not hold up the end
    allow_reuse_port = False  # two replays on one port would share its scrapes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no matter of the replay's."""


class _Handler(WSGIRequestHandler):
    timeout = 20  # for one that says nothing

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for each scrape."""
