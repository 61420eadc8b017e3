"""From a hub on 127.0.0.1 and from a mirror: whole files, continued after a break, or a message."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data_prep.fetch_fineweb_edu import REPOSITORY, fetch_from_hub, fetch_from_mirror
from data_prep.sources import FETCH_INCOMPLETE, find_files
from pretrain.errors import ConfigError, DataError
from tests.data_prep.conftest import make_documents, write_documents

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A small copy of the repository."""
    folder = tmp_path / "mirror"
    for i, name in enumerate(("sample/10BT/000", "sample/10BT/001", "data/CC-MAIN-2024-10/000")):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_documents(path, make_documents(20, seed=i))
    (folder / "README.md").write_text("about")
    return folder


class Hub(ThreadingHTTPServer):
    """The parts of the hub's protocol that a snapshot needs, for the files of a folder."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.files = sorted(
            p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
        )
        self.refused: set[str] = set()
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/api/datasets/{REPOSITORY}/revision/"):
            if path.rsplit("/", 1)[1] not in ("main", COMMIT):
                self.send_error(404, "no such revision")
                return
            siblings = [
                {"rfilename": name, "size": (self.server.folder / name).stat().st_size}
                for name in self.server.files
            ]
            self.reply(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode())
        elif match := re.fullmatch(rf"/datasets/{REPOSITORY}/resolve/{COMMIT}/(.*)", path):
            name = match[1]
            if name in self.server.refused:
                self.send_error(403, "refused")
                return
            if self.command == "GET":
                self.server.served.append(name)
            self.reply((self.server.folder / name).read_bytes(), name.replace("/", "-"))
        else:
            self.send_error(404, f"unexpected {self.path}")

    do_HEAD = do_GET

    def reply(self, body: bytes, etag: str = "x") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(mirror: Path) -> Iterator[Hub]:
    server = Hub(mirror)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_gives_the_subset_and_continues_after_a_break(
    hub: Hub, mirror: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hub.refused = {"sample/10BT/001.parquet"}
    with pytest.raises(DataError, match=r"the download stopped .*run the same command to continue"):
        fetch_from_hub("sample-10BT", out, endpoint=hub.url)
    with pytest.raises(ConfigError, match="download has not ended"):
        find_files([str(out)])
    hub.refused = set()
    sizes = fetch_from_hub("sample-10BT", out, endpoint=hub.url)
    assert list(sizes) == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    assert hub.served.count("sample/10BT/000.parquet") == 1
    for name in sizes:
        assert (out / name).read_bytes() == (mirror / name).read_bytes()
    assert [file.name for file in find_files([str(out)])] == list(sizes)


def test_hub_out_of_reach(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"fineweb-edu@main: http://127.0.0.1:9 does not give it .*--mirror"
    ):
        fetch_from_hub("sample-10BT", tmp_path / "out", endpoint="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"fineweb-edu@v9: http.* does not give it"):
        fetch_from_hub("sample-10BT", tmp_path / "out", endpoint=hub.url, revision="v9")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("copy", [False, True])
def test_mirror(mirror: Path, tmp_path: Path, copy: bool) -> None:
    out = tmp_path / "out"
    fetch_from_mirror("sample-10BT", out, mirror, max_files=1, copy=copy)
    first = out / "sample/10BT/000.parquet"
    assert first.is_symlink() != copy
    before = first.lstat().st_mtime_ns
    sizes = fetch_from_mirror("sample-10BT", out, mirror, copy=copy)
    assert first.lstat().st_mtime_ns == before
    assert len(sizes) == len(find_files([str(out)])) == 2
    assert not (out / FETCH_INCOMPLETE).exists()
    assert list(fetch_from_mirror("default", tmp_path / "other", mirror)) == [
        "data/CC-MAIN-2024-10/000.parquet"
    ]


def test_mirror_that_does_not_fit(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no files sample/100BT"):
        fetch_from_mirror("sample-100BT", tmp_path / "out", mirror)
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        fetch_from_mirror("sample-10BT", tmp_path / "out", tmp_path / "nowhere")
    fetch_from_mirror("default", tmp_path / "out", mirror)
    for copy in (False, True):
        with pytest.raises(
            ConfigError, match="holds 1 files that are not asked for, such as data/CC"
        ):
            fetch_from_mirror("sample-10BT", tmp_path / "out", mirror, copy=copy)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 10}))
    with pytest.raises(ConfigError, match=r"GB to fetch, 0\.0 GB free"):
        fetch_from_mirror("sample-10BT", tmp_path / "full", mirror, copy=True)
    fetch_from_mirror("sample-10BT", tmp_path / "linked", mirror)


@pytest.mark.parametrize(
    "name", ["sample/10BT/../../../evil.parquet", "sample/10BT/a\nb.parquet", "sample/10BT/..\\e.parquet"]
)
def test_a_hub_names_files_below_the_folder(hub: Hub, tmp_path: Path, name: str) -> None:
    (hub.folder / name).parent.mkdir(parents=True, exist_ok=True)
    (hub.folder / name).write_text("evil")
    hub.files.append(name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"a file's name is .*expected a relative path below its folder"):
        fetch_from_hub("sample-10BT", tmp_path / "out", endpoint=hub.url)
    assert sorted(tmp_path.rglob("*")) == before and not hub.served


@pytest.mark.parametrize("copy", [False, True])
def test_links_in_a_mirror_and_in_what_was_fetched(mirror: Path, tmp_path: Path, copy: bool) -> None:
    (mirror / "sample").rename(tmp_path / "other_disk")
    (mirror / "sample").symlink_to(tmp_path / "other_disk")
    (mirror / "data" / "gone.parquet").symlink_to("nowhere")  # another subset's
    out = tmp_path / "out"
    assert len(fetch_from_mirror("sample-10BT", out, mirror, copy=copy)) == 2
    with pytest.raises(ConfigError, match=r"gone\.parquet: a link that leads nowhere"):
        fetch_from_mirror("default", tmp_path / "default", mirror, copy=copy)
    first = out / "sample" / "10BT" / "000.parquet"
    first.unlink()
    first.symlink_to("nowhere")  # of a mirror that has moved
    fetch_from_mirror("sample-10BT", out, mirror, copy=copy)
    assert first.is_file() and not (out / FETCH_INCOMPLETE).exists()
    (tmp_path / "elsewhere" / "10BT").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "sample").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"linked/sample/10BT/000\.parquet leads out of .*linked through a symbolic"):
        fetch_from_mirror("sample-10BT", tmp_path / "linked", mirror, copy=copy)
    assert not list((tmp_path / "elsewhere" / "10BT").iterdir())
