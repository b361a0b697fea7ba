"""Archives that want to leave their folder, bombs, and the worst texts: refused, nothing written, memory bounded.

The suite unpacks no archive. It meets one where a user puts it in the place of a data folder, a data file or a
reference (.npz, which is a zip): each hostile kind is put into each of these places.
"""

import gzip
import hashlib
import io
import stat
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from harness.data import sets
from harness.data.download import DataError
from harness.data.location import locate
from harness.errors import UserError
from harness.measure import references

PROJECT = Path(__file__).resolve().parents[2]
NAMES = [
    "../outside.npy",
    "/tmp/outside.npy",
    "a/../../outside.npy",
    "..\\outside.npy",
    "C:\\outside.npy",
    "weights|../../outside.npy",
]
KINDS = {
    "symbolic link": tarfile.SYMTYPE,
    "hard link": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
    "fifo": tarfile.FIFOTYPE,
}


def array_bytes(count: int = 4) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(count, np.float32))
    return stream.getvalue()


def tar_of(kind: str, compression: str = "gz") -> bytes:
    """A tar of one hostile member: a name of NAMES, or one of KINDS that points outside."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as archive:
        member = tarfile.TarInfo(kind if kind in NAMES else "ptb.train.txt")
        member.type = KINDS.get(kind, tarfile.REGTYPE)
        member.linkname = "../../outside" if kind in KINDS else ""
        member.size = 0 if kind in KINDS else 4
        archive.addfile(member, io.BytesIO(b"text"))
    return packed.getvalue()


def zip_of(kind: str, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip with a good array and one hostile member."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("losses|.npy", array_bytes())
        member = zipfile.ZipInfo(kind if kind in NAMES else "outputs|link.npy")
        member.compress_type = method
        if kind == "symbolic link":
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(member, "../../outside")
        else:
            archive.writestr(member, array_bytes(1 << 20 if kind == "bomb" else 4))
    return packed.getvalue()


@pytest.fixture
def nothing_written(tmp_path, monkeypatch):
    """A folder to work in; afterwards nothing stands beside what the test itself put there."""
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    yield inner
    assert {path.name for path in tmp_path.rglob("*")} <= {"one", "two", "given", "ptb", "mnist"}
    assert not Path("/tmp/outside.npy").exists()


@pytest.mark.parametrize("kind", [*NAMES, *KINDS])
@pytest.mark.parametrize("packed", ["tar.gz", "tar", "zip"])
def test_archive_in_the_place_of_a_data_folder_or_file_is_refused_and_not_unpacked(nothing_written, kind, packed):
    content = zip_of(kind) if packed == "zip" else tar_of(kind, "gz" if packed == "tar.gz" else "")
    given = nothing_written / "given"
    given.write_bytes(content)
    with pytest.raises(UserError, match="no such folder; expected one that holds mnist/ and ptb/"):
        locate(str(given))
    with pytest.raises(DataError, match="expected"):
        sets.parse_idx(given, content, (2, 28, 28))
    with pytest.raises(DataError, match=r"is not UTF-8|expected [0-9a-f]{64}, the published ptb"):
        load_as_ptb(given)


def load_as_ptb(path: Path) -> None:
    file = sets.PTB.files[0]
    sets.download._load(path, file, sets._ptb_file)


@pytest.mark.parametrize("kind", [*NAMES[:-1], "symbolic link"])
def test_reference_whose_member_would_leave_its_folder_is_refused(nothing_written, kind):
    given = nothing_written / "given"
    given.write_bytes(zip_of(kind))
    with pytest.raises(
        UserError,
        match=r"no reference .*; remove the file, here and in the runs beside this one, and run again with --resume",
    ):
        references.load_reference(given)


def test_name_of_a_member_is_a_key_and_never_a_path(nothing_written):
    given = nothing_written / "given"
    given.write_bytes(zip_of("weights|../../outside.npy"))
    assert references.load_reference(given)["weights"].keys() == {"../../outside"}


# Bombs


def bombs() -> dict[str, bytes]:
    """Zips that say or hold thousands of times their size."""
    lying = bytearray(zip_of("plain"))
    at = lying.index(b"PK\x01\x02")
    lying[at + 24 : at + 28] = (2**31).to_bytes(4, "little")  # the size of the first member, unpacked
    shapes = io.BytesIO()
    with zipfile.ZipFile(shapes, "w") as archive:
        archive.writestr("losses|.npy", array_bytes().replace(b"(4,)", b"(999999999999,)"))
    overlapping = io.BytesIO(zip_of("plain"))
    with zipfile.ZipFile(overlapping, "a") as archive:
        for number in range(500):  # all of them the same bytes, as in Fifield's overlapping zip bomb
            member = zipfile.ZipInfo(f"a|{number}.npy")
            known = archive.infolist()[0]
            member.header_offset, member.CRC, member.file_size, member.compress_size = 0, known.CRC, 144, 144
            member.compress_type = known.compress_type
            archive.filelist.append(member)
        archive._didModify = True
    return {
        "deflated": zip_of("bomb", zipfile.ZIP_DEFLATED),
        "bzip2": zip_of("bomb", zipfile.ZIP_BZIP2),
        "lzma": zip_of("bomb", zipfile.ZIP_LZMA),
        "a size that is not there": bytes(lying),
        "a shape that is not there": shapes.getvalue(),
        "overlapping": overlapping.getvalue(),
    }


@pytest.mark.parametrize("kind", bombs())
def test_reference_that_would_grow_is_refused_before_it_is_unpacked(tmp_path, kind, monkeypatch):
    path = tmp_path / "reference.npz"
    path.write_bytes(bombs()[kind])
    monkeypatch.setattr(zlib, "decompressobj", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(UserError, match="no reference"):
        references.load_reference(path)


def test_good_reference_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "references" / "r.npz"
    written = {
        "losses": np.arange(3.0),
        "outputs": {"logits": np.arange(60.0).reshape(3, 20).T},
        "empty": {"a": np.zeros((0, 3))},
    }
    references.save_reference(path, written)
    found = references.load_reference(path)
    assert found.keys() == written.keys() and found["losses"].dtype == np.float64
    assert np.array_equal(found["outputs"]["logits"], written["outputs"]["logits"])
    assert found["empty"]["a"].shape == (0, 3) and found["outputs"]["logits"].flags.writeable


# What may come of a file of the published size, and of larger ones

WORST = {
    "gzip in the place of MNIST, 1000 times its size": "gzip.compress(bytes([0, 0, 8, 3]) + bytes(10**9 // 16), 1)",
    "gzip in gzip": "gzip.compress(gzip.compress(bytes(5 * 10**7)))",
    "one-letter words": "b'a ' * (size // 2)",
    "two-letter words": "(b'ab ' * size)[:size]",
    "a million words": "' '.join(f'{number:05x}' for number in range(size // 6)).encode()",
    "lines": "b'a' + b'\\n' * (size - 1)",
    "characters of four bytes": "('\\U0001f600 ' * (size // 5)).encode()",
    "a file that is too large": "b'ab ' * (4 * size)",
    "a file of 60 GB": "None",
}


@pytest.mark.parametrize("kind", WORST)
def test_worst_file_of_a_data_set_takes_no_more_than_256_mib(tmp_path, kind):
    """Made in one process, read in another whose address space is limited to what it has and 256 MiB."""
    path = tmp_path / "ptb.train.txt"
    size = sets.PTB.files[0].size
    if "60 GB" in kind:
        with path.open("wb") as file:
            file.truncate(60 * 10**9)
    else:
        program = f"import gzip, sys; size = {size}; sys.stdout.buffer.write({WORST[kind]})"
        path.write_bytes(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    reads = f"""
import resource, sys
from pathlib import Path
from harness.data import sets as data; from harness.data import download
from tests.fuzz.drive import MEMORY, address_space
resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY,) * 2)
for file, parse in ((data.PTB.files[0], data._ptb_file), (data.MNIST.files[0], data._mnist_file)):
    try:
        words = download._load(Path({str(path)!r}), file, parse)
    except download.DataError as error:
        print("refused", str(error)[-150:])
try:  # what a file with the right sum would come to
    words = data.parse_text(Path("x"), download.read_bytes(Path({str(path)!r}), {size}))
    print("words", len(data.encode(words, data.build_vocabulary(words))))
except download.DataError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", reads], cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    assert done.stdout.count("refused") == 2, done.stdout
    assert ("words" in done.stdout) == (
        kind.split()[0] in ("one-letter", "two-letter", "a", "lines", "characters") and "file" not in kind
    )


def test_data_are_taken_by_their_sha256_alone(tmp_path):
    """A text of PTB's size that is as good as any is not PTB."""
    file = sets.PTB.files[2]
    path = tmp_path / file.name
    path.write_bytes(b"a b\n" * (file.size // 4) + b"a" * (file.size % 4))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"sha256 {digest}; expected {file.sha256}"):
        sets.download._load(path, file, sets._ptb_file)
    published = [*sets.PTB.files, *sets.MNIST.files]
    assert len({file.sha256 for file in published}) == 7 and all(
        len(bytes.fromhex(file.sha256)) == 32 for file in published
    )


def test_gzip_in_place_of_a_text_is_no_text(tmp_path):
    with pytest.raises(DataError, match="not UTF-8"):
        sets.parse_text(tmp_path, gzip.compress(b"a b\n"))
