"""Files are taken from a folder, a cache or a mirror, and only when every byte is as published."""

import hashlib
import os
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.data.download import DataError, File, Limits, Published, Unavailable, fetch, find
from harness.errors import UserError

CONTENT = bytes(range(256)) * 400  # 102,400 bytes, more than one piece
NAME = "numbers.bin"
FILE = File(NAME, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
# Of a server on this machine; as short as tests that wait for them bear, as long as a busy machine needs to answer.
QUICK = Limits(answer_s=1.5, no_answer_s=3.6, stall_s=1.8, bytes_per_s=30_000)


class Handler(BaseHTTPRequestHandler):
    """GET /<behaviour>/…/<name>: every behaviour is a mirror of its own."""

    def do_GET(self):
        behaviour = self.path.split("/")[1]
        self.server.asked.append(behaviour)
        getattr(self, f"serve_{behaviour}")()

    def head(self, length, status=200, **headers):
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, content, length=True):
        self.head(len(content) if length else None)
        self.wfile.write(content)

    def serve_good(self):
        self.body(CONTENT)

    def serve_unannounced(self):
        self.body(CONTENT, length=False)

    def serve_missing(self):
        self.head(0, 404)

    def serve_broken(self):
        self.head(0, 503)

    def serve_wrong(self):
        self.body(CONTENT[::-1])

    def serve_page(self):
        self.body(b"<html>log in to the network first</html>")

    def serve_truncated(self):
        self.head(len(CONTENT))
        self.wfile.write(CONTENT[:70_000])

    def serve_short(self):
        self.body(CONTENT[:70_000], length=False)

    def serve_more(self):  # than it announced
        self.head(len(CONTENT))
        self.wfile.write(CONTENT + b"more")

    def serve_endless(self):
        self.head(None)
        while not self.server.stop.is_set():
            self.wfile.write(CONTENT)

    def serve_trickle(self):
        self.head(len(CONTENT))
        for at in range(0, len(CONTENT), 500):  # 10 kB/s, no pause as long as a stall
            self.wfile.write(CONTENT[at : at + 500])
            if self.server.stop.wait(0.05):
                return

    def serve_stalled(self):
        self.head(len(CONTENT))
        self.wfile.write(CONTENT[:70_000])
        self.server.stop.wait(600)

    def serve_silent(self):
        self.server.stop.wait(600)

    def serve_redirect(self):
        self.head(0, 302, Location=f"/good/{NAME}")

    def serve_circle(self):
        self.head(0, 302, Location=f"/circle/{NAME}")

    def serve_local(self):
        self.head(0, 302, Location="file:///etc/hostname")

    def serve_second(self):
        self.serve_good() if self.server.asked.count("second") > 1 else self.serve_truncated()

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.stop = threading.Event()

    def mirror(self, behaviour):
        return f"http://127.0.0.1:{self.server_port}/{behaviour}"

    def handle_error(self, request, client_address):
        pass  # clients hang up on purpose here


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.stop.set()
        server.shutdown()
        thread.join()


def test_every_good_way_of_serving_gives_the_file_and_leaves_nothing_else(server, tmp_path):
    for behaviour in ("good", "unannounced", "redirect", "more"):
        folder = tmp_path / behaviour / "new"
        fetch([FILE], [server.mirror(behaviour)], folder, QUICK)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {NAME: CONTENT}


BAD = {
    "missing": "HTTP 404",
    "broken": "HTTP 503",
    "wrong": f"sha256 {hashlib.sha256(CONTENT[::-1]).hexdigest()}, expected {FILE.sha256}",
    "page": "announced 40 bytes, expected 102400",
    "truncated": "sent 70000 bytes, expected 102400",
    "short": "sent 70000 bytes, expected 102400",
    "endless": "sent more than 102400 bytes, expected 102400",
    "trickle": "too slow",
    "stalled": "timed out",
    "silent": "no answer within 1.5 s",
    "circle": "redirect",
    "local": "is not allowed",
}


@pytest.mark.parametrize("behaviour", BAD)
def test_bad_mirror_is_asked_twice_leaves_no_file_and_is_named_with_its_reason(server, tmp_path, behaviour):
    with pytest.raises(Unavailable) as caught:
        fetch([FILE], [server.mirror(behaviour)], tmp_path, QUICK)
    assert BAD[behaviour] in str(caught.value)
    assert str(caught.value).startswith(NAME) and f"127.0.0.1:{server.server_port}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if behaviour != "circle":  # urllib itself follows a circle a few times
        assert server.asked.count(behaviour) == 2


def test_the_bar_leaves_no_thread_that_a_rows_proof_would_take_for_work(server, tmp_path):
    before = threading.enumerate()
    fetch([FILE], [server.mirror("good")], tmp_path, QUICK)
    assert "TMonitor" not in {type(thread).__name__ for thread in threading.enumerate() if thread not in before}


@pytest.mark.parametrize("behaviour", BAD)
def test_after_a_bad_mirror_the_next_one_is_taken(server, tmp_path, behaviour):
    fetch([FILE], [server.mirror(behaviour), server.mirror("good")], tmp_path, QUICK)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_mirror_that_fails_once_is_asked_again(server, tmp_path):
    fetch([FILE], [server.mirror("missing"), server.mirror("second")], tmp_path, QUICK)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked == ["missing", "second", "missing", "second"]


def test_the_mirror_that_worked_comes_first_for_the_next_file(server, tmp_path):
    files = [FILE, FILE._replace(name="again.bin")]
    fetch(files, [server.mirror("missing"), server.mirror("good")], tmp_path, QUICK)
    assert server.asked == ["missing", "good", "good"]
    assert (tmp_path / "again.bin").read_bytes() == CONTENT


def test_an_older_file_stays_until_the_new_one_is_whole(server, tmp_path):
    (tmp_path / NAME).write_bytes(b"older")
    with pytest.raises(Unavailable):
        fetch([FILE], [server.mirror("truncated")], tmp_path, QUICK)
    assert (tmp_path / NAME).read_bytes() == b"older"


def test_refused_connections_are_given_up_at_once_and_make_no_folder(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match="Connection refused"):
        fetch([FILE], [f"http://127.0.0.1:{port}/a", f"http://127.0.0.1:{port}/b"], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_network_that_never_answers_is_given_up_within_its_limit(server, tmp_path):
    mirrors = [server.mirror(f"silent/{number}") for number in range(8)]
    with pytest.raises(Unavailable, match="not asked, no server has answered"):
        fetch([FILE], mirrors, tmp_path, QUICK)
    assert len(server.asked) == 3


def test_a_name_look_up_that_hangs_is_given_up_within_its_limit(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *arguments, **keywords: released.wait(600))
    with pytest.raises(Unavailable, match="no answer within"):
        fetch([FILE], ["http://nowhere.invalid"], tmp_path, QUICK)
    released.set()


def test_default_limits_give_up_a_dead_network_within_ten_seconds():
    assert Limits().answer_s <= Limits().no_answer_s <= 10


def test_a_full_disk_is_a_user_error_and_not_the_mirrors_fault(server, tmp_path):
    (tmp_path / f".{NAME}.part-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"no space left .* --data=DIR"):
        fetch([FILE], [server.mirror("good")], tmp_path, QUICK)
    assert server.asked == ["good"] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_unavailable_without_its_path(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="mnist/ cannot be written: Not a directory") as caught:
        fetch([FILE], [server.mirror("good")], tmp_path / "file" / "mnist", QUICK)
    assert str(tmp_path) not in str(caught.value)


# find


def parse(path, raw, file):
    if not raw.startswith(CONTENT[:4]):
        raise DataError(path, f"begins with {raw[:4]!r}", "numbers")
    return raw


@pytest.fixture
def wanted(server):
    other = CONTENT + b"other"
    server_files = (FILE, File("other.bin", len(other), hashlib.sha256(other).hexdigest()))
    return Published("set", server_files, (server.mirror("good"),))


def put(folder, wanted):
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(CONTENT)
    (folder / "other.bin").write_bytes(CONTENT + b"other")
    return folder


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("nested", [True, False])
def test_given_folder_holds_the_files_in_a_sub_folder_or_directly(server, wanted, tmp_path, nested):
    put(tmp_path / "mine" / "set" if nested else tmp_path / "mine", wanted)
    contents, where, sums = find(wanted, parse, tmp_path / "mine", "--data", tmp_path / "own", [])
    assert contents == [CONTENT, CONTENT + b"other"] and where == "--data"
    assert sums == {file.name: file.sha256 for file in wanted.files}
    assert server.asked == []


def test_given_folder_that_lacks_a_file_is_a_user_error_that_says_what_is_expected(server, wanted, tmp_path):
    folder = put(tmp_path / "mine", wanted)
    (folder / NAME).unlink()
    with pytest.raises(UserError) as caught:
        find(wanted, parse, folder, "LSTM_BENCH_DATA", put(tmp_path / "own" / "set", wanted).parent, [])
    assert str(caught.value) == (
        f"LSTM_BENCH_DATA: {folder} lacks {NAME}; expected {NAME}, other.bin in {folder / 'set'} or in {folder} itself"
    )


@pytest.mark.parametrize(
    ("bad", "found"),
    [(b"bad", "begins with b'bad'"), (CONTENT[:9], "sha256 "), (CONTENT * 700, "more than 102400 bytes")],
)
def test_corrupt_file_in_a_given_folder_is_an_error_and_never_touched(server, wanted, tmp_path, bad, found):
    folder = put(tmp_path / "mine", wanted)
    (folder / NAME).write_bytes(bad)
    before = snapshot(folder)
    with pytest.raises(DataError) as caught:
        find(wanted, parse, folder, "--data", tmp_path / "own", [])
    assert str(caught.value).startswith(f"{folder / NAME}: {found}") and "; expected " in str(caught.value)
    assert snapshot(folder) == before and server.asked == []


def test_own_files_are_used_before_the_cache_and_the_network(server, wanted, tmp_path):
    put(tmp_path / "set", wanted)
    notes = []
    contents, where, _ = find(wanted, parse, None, "", tmp_path, notes, cache=lambda notes: pytest.fail("not needed"))
    assert (contents, where, notes) == ([CONTENT, CONTENT + b"other"], "data/", [])
    assert server.asked == []


def test_the_cache_is_used_before_the_network(server, wanted, tmp_path):
    found = find(wanted, parse, None, "", tmp_path, [], cache=lambda notes: (["a", "b"], {"ab": "0"}))
    assert found == (["a", "b"], "keras cache", {"ab": "0"})
    assert server.asked == []


def test_only_missing_files_are_downloaded(server, wanted, tmp_path):
    put(tmp_path / "set", wanted)
    (tmp_path / "set" / NAME).unlink()
    contents, where, _ = find(wanted, parse, None, "", tmp_path, [], cache=lambda notes: None)
    assert (contents, where) == ([CONTENT, CONTENT + b"other"], "download")
    assert server.asked == ["good"]
    assert find(wanted, parse, None, "", tmp_path, [])[1] == "data/"


def test_corrupt_own_file_is_set_aside_every_time_and_fetched_anew(server, wanted, tmp_path):
    folder = put(tmp_path / "set", wanted)
    for number, bad in enumerate([b"first", CONTENT[:-1], b""], start=1):
        (folder / NAME).write_bytes(bad)
        notes = []
        assert find(wanted, parse, None, "", tmp_path, notes)[0][0] == CONTENT
        assert (folder / f"{NAME}.corrupt-{number}").read_bytes() == bad
        assert len(notes) == 1 and notes[0].endswith(f"set aside as {NAME}.corrupt-{number}")
        assert str(tmp_path) not in notes[0]
    assert len(snapshot(folder)) == 5


def test_corrupt_own_file_without_a_network_is_set_aside_and_reported_unavailable(server, wanted, tmp_path):
    folder = put(tmp_path / "set", wanted)
    (folder / NAME).write_bytes(b"bad")
    notes = []
    with pytest.raises(Unavailable, match="HTTP 404"):
        find(wanted._replace(mirrors=(server.mirror("missing"),)), parse, None, "", tmp_path, notes)
    assert (folder / f"{NAME}.corrupt-1").read_bytes() == b"bad" and not (folder / NAME).exists()
    assert notes == [f"data/set/{NAME}: begins with b'bad'; set aside as {NAME}.corrupt-1"]
