"""`replay --metrics-port`: scraped over HTTP while the replay runs and at its end; what becomes of mistakes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from batching.__main__ import main
from batching.replay import command
from batching.replay.scheduler import Scheduler
from batching.replay.serve import HOST, MetricsServer
from staging import Field, Layout, StagingPool
from staging.metrics import FAMILIES, WAIT

REPLAY = ["replay", "--device", "cpu", "--requests", "20"]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def ask(url: str) -> bytes:
    """One answer, without a proxy in between."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def scrape(address: str) -> Samples:
    """Read by the client's own parser."""
    families = text_string_to_metric_families(ask(address).decode())
    return {(sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"pool": "replay", "device": "cpu", **labels}.items())]


def address_in(text: str) -> str:
    found = re.search(rf"^replay: metrics at (http://{re.escape(HOST)}:\d+/metrics)$", text, re.MULTILINE)
    assert found, text
    return found[1]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(0) as serving:
        yield serving


def test_a_scrape_during_the_replay_reads_the_pool_as_it_is_then(monkeypatch, capsys, tmp_path):
    """In the middle of the run: the pool's own numbers of that moment, which rise from one scrape to the next."""
    read = Scheduler._read
    seen, printed = [], []

    def scraping(self, queued):
        if len(seen) < 3:
            printed.append(capsys.readouterr().err)
            seen.append((scrape(address_in("".join(printed))), self.pool.stats()))
        return read(self, queued)

    monkeypatch.setattr(Scheduler, "_read", scraping)
    path = tmp_path / "result.json"
    assert main([*REPLAY, "--metrics-port", "0", "--json", str(path)]) == 0
    uploads = [value(samples, "staging_uploads_total") for samples, _ in seen]
    assert uploads == [stats.uploads for _, stats in seen]
    assert 0 < uploads[0] < uploads[1] < uploads[2] < json.loads(path.read_text())["uploads"]
    for samples, stats in seen:
        assert value(samples, "staging_slots", state="in_flight") == stats.in_flight
        assert value(samples, "staging_leases_total", outcome="ready") == stats.leases_ready
    with pytest.raises(urllib.error.URLError, match="refused"):  # it ends with the replay
        ask(address_in("".join(printed)))


def test_a_scrape_at_the_end_reads_what_the_result_says_and_ends_the_hold(tmp_path):
    """As a process of its own: each number of the JSON, in seconds where it is a time; then status 0, long before the
    hold is over."""
    path = tmp_path / "result.json"
    arguments = [*REPLAY, "--metrics-port", "0", "--metrics-hold", "300", "--json", str(path)]
    with subprocess.Popen(
        [sys.executable, "-m", "batching", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            address = address_in(process.stderr.readline())
            assert f"metrics stay at {address} until they are scraped, 5 min 00 s" in process.stderr.readline()
            keys = json.loads(path.read_text())["pool"]
            samples = scrape(address)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert "mismatches                 0" in out
    for family in FAMILIES:
        for label, key in family.keys.items():
            shown = value(samples, family.name, **({family.label: label} if family.label else {}))
            assert shown == (keys[key] / 1e9 if family.seconds else keys[key]), key
    assert value(samples, f"{WAIT}_count") == keys["waits"]
    assert keys["slots"] == keys["in_flight"] == 4  # the pool was still open


def test_the_hold_lasts_until_a_scrape_that_began_in_it(server, make_pool):
    """Neither one before it nor a browser's icon counts."""
    server.show(make_pool("cpu", name="replay"))
    assert scrape(server.address)
    server.hold(0)
    assert ask(server.address.replace("metrics", "favicon.ico")) == b""
    begin = time.monotonic()
    server.hold(0.2)
    assert time.monotonic() - begin >= 0.2
    holding = threading.Thread(target=server.hold, args=(300,))
    holding.start()
    assert scrape(server.address)
    holding.join(20)
    assert not holding.is_alive()


def test_a_scrape_that_began_before_the_end_does_not_end_the_hold(make_pool):
    """Its numbers may be those of a moment before."""
    layout = Layout([Field("a", torch.int64)])
    pool = make_pool("cpu", name="replay")
    entered, go_on = threading.Event(), threading.Event()
    stats = pool.stats

    def slow():
        entered.set()
        go_on.wait(20)
        return stats()

    pool.stats = slow
    with MetricsServer(0) as server:
        server.show(pool)
        asking = threading.Thread(target=scrape, args=(server.address,))
        asking.start()
        assert entered.wait(20)
        with pool.lease(layout, rows=1) as lease:
            lease["a"] = 1
            lease.upload()
        server.hold(0)
        go_on.set()
        asking.join(20)
        begin = time.monotonic()
        server.hold(0.2)
        assert time.monotonic() - begin >= 0.2


def test_ctrl_c_ends_the_hold_and_leaves_the_status(monkeypatch, capsys):
    """What was to be done is done: the table stands, status 0, and the replay is not called interrupted."""

    hold = MetricsServer.hold

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            os.kill(os.getpid(), signal.SIGINT)
            return super().wait(timeout)

    def interrupted(self, seconds):
        self._read = Interrupted()
        hold(self, seconds)

    monkeypatch.setattr(MetricsServer, "hold", interrupted)
    assert main([*REPLAY, "--metrics-port", "0", "--metrics-hold", "300"]) == 0
    out, err = capsys.readouterr()
    assert "20 finished" in out
    assert "interrupted" not in err


def test_metrics_and_a_timeline_go_together(tmp_path, capsys):
    """The observed pool is collected as well, and the timeline is written after the hold, with all slots back."""
    path = tmp_path / "timeline.json"
    arguments = [*REPLAY, "--metrics-port", "0", "--metrics-hold", "0.01", "--timeline", str(path)]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert address_in(err)
    assert re.search(r"^timeline {19}.*: [\d,]+ events of \d+ iterations\n\Z", out, re.MULTILINE)
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "in flight"]
    assert spans
    assert not any("cut" in span["args"] for span in spans)


@pytest.mark.parametrize("taken_by", ["a socket", "another replay"])
def test_a_port_that_is_taken_stops_the_command_before_the_replay(taken_by, monkeypatch, capsys):
    """Status 2 and one line, which names the port and the way out."""
    monkeypatch.setattr(command, "_replay", lambda *arguments: pytest.fail("it was started"))
    if taken_by == "a socket":
        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
            status = main([*REPLAY, "--metrics-port", str(port)])
    else:
        with MetricsServer(0) as other:
            port = int(other.address.split(":")[2].split("/")[0])
            status = main([*REPLAY, "--metrics-port", str(port)])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err == (
        f"replay: cannot serve metrics on {HOST}:{port}: Address already in use; "
        f"choose another --metrics-port, or 0 for a free one\n"
    )


def test_without_the_client_the_command_says_what_to_install(monkeypatch, capsys):
    """Status 2 and one line; the library itself needs no client, so a replay without the option goes on."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "staging.metrics")
    monkeypatch.setattr(command, "_replay", lambda *arguments: pytest.fail("it was started"))
    assert main([*REPLAY, "--metrics-port", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("replay: --metrics-port needs the Prometheus client (")
    assert err.endswith("): pip install 'staging-pool[metrics]'\n")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(REPLAY) == 0


def test_a_hold_without_a_port_is_a_mistake(capsys):
    """Status 2, and the option that is missing."""
    assert main([*REPLAY, "--metrics-hold", "5"]) == 2
    assert "give --metrics-port as well" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--metrics-port=-1", "--metrics-port=65536", "--metrics-hold=nan", "--metrics-hold=-1"]
)
def test_numbers_out_of_range_are_mistakes(option, capsys):
    """Status 2 and the bounds."""
    with pytest.raises(SystemExit) as stopped:
        main([*REPLAY, option])
    assert stopped.value.code == 2
    assert re.search(r"is not a (whole )?number from 0 to [\d,]+\n", capsys.readouterr().err)


def test_a_client_that_says_nothing_does_not_hold_up_the_end():
    """Its connection is open while the server ends."""
    with MetricsServer(0) as server:
        silent = socket.create_connection((HOST, int(server.address.split(":")[2].split("/")[0])))
        scrape(server.address)  # which came after it
        begin = time.monotonic()
    took = time.monotonic() - begin
    silent.close()
    assert took < 5


def test_a_client_that_goes_away_in_the_middle_leaves_no_trace(server, capfd):
    """Of a connection that was reset nothing is printed, and the next scrape is answered."""
    for _ in range(3):
        rude = socket.create_connection((HOST, int(server.address.split(":")[2].split("/")[0])))
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
        rude.sendall(b"GET /metrics HT")
        rude.close()
    assert ask(server.address)
    server._server.shutdown()
    assert capfd.readouterr() == ("", "")


def test_the_pool_is_not_kept_alive(server):
    """The server shows pools, it does not own them."""
    pool = StagingPool("cpu", name="replay")
    server.show(pool)
    ref = weakref.ref(pool)
    pool.close()
    del pool
    gc.collect()
    assert ref() is None
