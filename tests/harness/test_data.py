"""The data sets are what they were published as, every bad file is named, and the embedded sets stand in by rule."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data import sets
from harness.data.batches import language_model_batches
from harness.data.location import ENVIRONMENT, locate
from harness.data.sets import DataError, File, Published, parse_idx, parse_text
from harness.errors import UserError

PATH = Path("folder/some.gz")
SHAPE = (5, 3, 2)
PIXELS = np.arange(30, dtype=np.uint8).reshape(SHAPE)
NOWHERE = ("http://127.0.0.1:1/a", "http://127.0.0.1:1/b")  # nothing listens on port 1


def idx(array, magic=None, counts=None):
    """IDX bytes, not gzipped yet."""
    head = bytes([0, 0, 8, array.ndim]) if magic is None else magic
    return head + np.array(counts or array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """No environment variable, own data folder, Keras cache or network; returns the folder that stands for data/."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sets, "PROJECT_DATA", tmp_path / "data")
    monkeypatch.setattr(sets, "MNIST", sets.MNIST._replace(mirrors=NOWHERE))
    monkeypatch.setattr(sets, "PTB", sets.PTB._replace(mirrors=NOWHERE))
    return tmp_path / "data"


@pytest.fixture
def small(elsewhere, monkeypatch, tmp_path):
    """Sets of a few bytes under the published names; returns a folder that holds them."""
    labels = np.array([3, 1, 4, 1, 5], np.uint8)
    contents = {
        "mnist": [gzip.compress(idx(array), mtime=0) for array in (PIXELS, labels, PIXELS[:2], labels[:2])],
        "ptb": [b" a b a \n a <unk> N \n", b" b a \n", b" N \n b \n"],
    }
    names = {"mnist": [file.name for file in sets.MNIST.files], "ptb": [file.name for file in sets.PTB.files]}
    shapes = zip(names["mnist"], (SHAPE, (5,), (2, 3, 2), (2,)), strict=True)
    monkeypatch.setattr(sets, "MNIST_SHAPES", dict(shapes))
    for name, raws in contents.items():
        (tmp_path / "given" / name).mkdir(parents=True)
        files = []
        for file, raw in zip(names[name], raws, strict=True):
            (tmp_path / "given" / name / file).write_bytes(raw)
            files.append(File(file, len(raw), hashlib.sha256(raw).hexdigest()))
        monkeypatch.setattr(sets, name.upper(), Published(name, tuple(files), NOWHERE))
    return tmp_path / "given"


# parsing


def test_idx_is_read_with_its_shape_and_can_be_written_to():
    array = parse_idx(PATH, gzip.compress(idx(PIXELS)), SHAPE)
    assert array.dtype == np.uint8 and np.array_equal(array, PIXELS)
    array[0] = 9


GOOD = gzip.compress(idx(PIXELS), mtime=0)
BAD_IDX = {
    "empty": (b"", "not gzip, starts with nothing; expected a gzipped IDX file"),
    "not gzip": (idx(PIXELS), "not gzip, starts with 00000803; expected a gzipped IDX file"),
    "page": (b"<html>", "not gzip, starts with 3c68746d; expected a gzipped IDX file"),
    "labels": (gzip.compress(idx(PIXELS[:, 0, 0])), "magic number 00000801; expected 00000803"),
    "floats": (gzip.compress(idx(PIXELS, b"\0\0\x0d\3")), "magic number 00000d03; expected 00000803"),
    "counts": (gzip.compress(idx(PIXELS, counts=(5, 2, 3))), "declares 5x2x3 values; expected 5x3x2"),
    "huge count": (gzip.compress(idx(PIXELS, counts=(2**32 - 1, 3, 2))), "declares 4294967295x3x2 values; expected"),
    "header only": (gzip.compress(idx(PIXELS)[:16]), "truncated after 0 values; expected 30 values (5x3x2)"),
    "half a header": (gzip.compress(idx(PIXELS)[:7]), "truncated after 0 values; expected 30 values"),
    "one value short": (gzip.compress(idx(PIXELS)[:-1]), "truncated after 29 values; expected 30 values"),
    "one value more": (gzip.compress(idx(PIXELS) + b"\0"), "bytes after the last value; expected 5x3x2 values"),
    "gzip cut off": (GOOD[:-12], "truncated after "),
    "check sum cut off": (GOOD[:-1], "truncated after 30 values"),
    "check sum wrong": (GOOD[:-8] + bytes(8), "broken gzip ("),
    "deflate broken": (GOOD[:10] + b"\xff" * 9 + GOOD[19:], "broken gzip ("),
    "bytes after": (GOOD + b"\0", "bytes after the last value"),
    "second member": (GOOD + GOOD, "bytes after the last value"),
}


@pytest.mark.parametrize("name", BAD_IDX)
def test_bad_idx_is_an_error_with_path_found_and_expected(name):
    raw, message = BAD_IDX[name]
    with pytest.raises(DataError) as caught:
        parse_idx(PATH, raw, SHAPE)
    assert str(caught.value).startswith(f"{PATH}: {message}") and "; expected " in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_decompression_bomb_is_not_unpacked(monkeypatch):
    unpacked = []

    class Counting:
        def __init__(self, **keywords):
            self.stream = real(**keywords)

        def decompress(self, *arguments):
            unpacked.append(len(piece := self.stream.decompress(*arguments)))
            return piece

        def __getattr__(self, name):
            return getattr(self.stream, name)

    bomb = gzip.compress(idx(PIXELS) + bytes(50_000_000))
    real = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    with pytest.raises(DataError, match="bytes after the last value"):
        parse_idx(PATH, bomb, SHAPE)
    assert sum(unpacked) == 16 + 30 + 1


@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_any_changed_byte_gives_the_same_values_or_a_data_error(at, byte, cut):
    for raw in (GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], GOOD[:cut] + GOOD[cut + byte :]):
        try:
            array = parse_idx(PATH, raw, SHAPE)  # a name or date in gzip's own header may change
        except DataError as error:
            assert error.path == PATH and error.found and error.expected
        else:
            assert np.array_equal(array, PIXELS)


@given(st.binary(max_size=80))
def test_any_bytes_as_text_give_words_or_a_data_error(raw):
    try:
        words = parse_text(PATH, raw)
    except DataError as error:
        assert error.path == PATH
    else:
        assert words.count("<eos>") >= raw.count(b"\n") and len(words) > raw.count(b"\n")
        assert all(word and word == "".join(word.split()) for word in words)


def test_text_has_one_eos_for_each_newline():
    assert parse_text(PATH, " no it was n't\n\n über N\n".encode()) == [
        "no",
        "it",
        "was",
        "n't",
        "<eos>",
        "<eos>",
        "über",
        "N",
        "<eos>",
    ]
    assert parse_text(PATH, b"a\nb") == ["a", "<eos>", "b"]
    assert parse_text(PATH, "a\u2028b\x0bc\n".encode()) == ["a", "b", "c", "<eos>"]  # not newlines of the text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty; expected lines of words"),
        (b" \n \n\n", "no words; expected lines of words"),
        (b"caf\xe9 au lait\n", "byte 0xe9 at 3 is not UTF-8; expected UTF-8 text"),
        ("wide\n".encode("utf-16"), "byte 0xff at 0 is not UTF-8; expected UTF-8 text"),
    ],
)
def test_bad_text_is_an_error_with_path_found_and_expected(raw, message):
    with pytest.raises(DataError) as caught:
        parse_text(PATH, raw)
    assert str(caught.value) == f"{PATH}: {message}"


# where they come from


def test_sets_of_a_given_folder_are_real_and_their_facts_hold_no_path(small, monkeypatch):
    mnist, ptb = sets.mnist(*locate(str(small))), sets.ptb(small)
    assert np.array_equal(mnist.x_train, PIXELS) and mnist.y_test.tolist() == [3, 1]
    assert ptb.vocabulary == ["a", "<eos>", "<unk>", "N", "b"]  # train has them 3, 2, 1, 1 and 1 times
    assert [part.tolist() for part in ptb[1:3]] == [[4, 0, 1], [3, 1, 4, 1]]
    for facts in (mnist.facts, ptb.facts):
        assert (facts["source"], facts["where"], facts["reason"], facts["notes"]) == ("real", "--data", "", [])
        assert str(small.parent) not in json.dumps(facts)
    assert mnist.facts["sha256"] == {file.name: file.sha256 for file in sets.MNIST.files}
    monkeypatch.setenv(ENVIRONMENT, str(small))
    assert sets.mnist().facts["where"] == "LSTM_BENCH_DATA"


def test_given_folder_without_the_set_is_a_user_error_and_never_the_embedded_set(small, tmp_path):
    (tmp_path / "bare").mkdir()
    for read in (sets.mnist, sets.ptb):
        with pytest.raises(UserError, match=r"^--data: .*bare lacks .*; expected .* in .*bare itself"):
            read(tmp_path / "bare")


def test_label_over_nine_is_an_error(small, monkeypatch):
    path = small / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.array([3, 10], np.uint8))))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz: label 10; expected labels from 0 to 9"):
        sets.mnist(small)


def test_own_copy_is_found_in_data(small, elsewhere):
    small.rename(elsewhere)
    assert sets.mnist().facts["where"] == sets.ptb().facts["where"] == "data/"


def write_keras_cache(tmp_path, monkeypatch, **changed):
    arrays = {"x_train": PIXELS, "y_train": PIXELS[:, 0, 0], "x_test": PIXELS[:2], "y_test": PIXELS[:2, 0, 0]}
    path = tmp_path / "keras" / "datasets" / "mnist.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, **(arrays | changed))
    monkeypatch.setattr(sets, "KERAS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_keras_cache_is_used_when_data_has_nothing(elsewhere, tmp_path, monkeypatch):
    write_keras_cache(tmp_path, monkeypatch)
    mnist = sets.mnist()
    assert np.array_equal(mnist.x_train, PIXELS) and np.array_equal(mnist.y_test, PIXELS[:2, 0, 0])
    assert (mnist.facts["where"], mnist.facts["source"]) == ("keras cache", "real")
    assert mnist.facts["sha256"] == {"mnist.npz": sets.KERAS_SHA256}


def test_keras_cache_with_pickles_is_never_unpickled(elsewhere, tmp_path, monkeypatch):
    write_keras_cache(tmp_path, monkeypatch, x_train=np.array([Path("a"), {}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        sets.mnist()


def test_other_file_in_the_keras_cache_is_passed_over_noted_and_left_alone(elsewhere, tmp_path, monkeypatch):
    path = write_keras_cache(tmp_path, monkeypatch)
    path.write_bytes(b"other")
    mnist = sets.mnist()
    assert mnist.facts["source"] == "embedded" and path.read_bytes() == b"other"
    assert mnist.facts["notes"] == [
        f"Keras' cached mnist.npz was passed over: sha256 {hashlib.sha256(b'other').hexdigest()}, "
        f"expected {sets.KERAS_SHA256}"
    ]


def test_without_any_real_set_the_embedded_ones_are_taken_and_say_why(elsewhere):
    for read, name in ((sets.mnist, "train-images-idx3-ubyte.gz"), (sets.ptb, "ptb.train.txt")):
        facts = read().facts
        assert facts["source"] == "embedded"
        assert facts["reason"] == f"{name} could not be downloaded: Connection refused (127.0.0.1:1)"
    assert not elsewhere.exists()


def test_reading_data_imports_neither_frameworks_nor_scikit_learn():
    code = "import sys, harness.data.sets as data; data.synthetic(100); data.ptb(None, True); print(*sys.modules)"
    root = Path(sets.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "numpy" in loaded
    assert not loaded & {"tensorflow", "keras", "torch", "jax", "sklearn", "pandas"}


# embedded


def test_embedded_digits_have_the_form_of_mnist_and_are_the_same_every_time():
    mnist = sets.mnist(None, "no network")
    assert mnist.x_train.shape == (1497, 28, 28) and mnist.x_test.shape == (300, 28, 28)
    assert {array.dtype for array in mnist[:4]} == {np.dtype(np.uint8)}
    assert mnist.x_train.min() == 0 and mnist.x_train.max() == 255
    assert set(mnist.y_train) == set(mnist.y_test) == set(range(10))
    assert mnist.facts["reason"] == "no network" and mnist.facts["source"] == "embedded"
    whole = (
        np.concatenate([mnist.x_train, mnist.x_test]).tobytes()
        + np.concatenate([mnist.y_train, mnist.y_test]).tobytes()
    )
    assert mnist.facts["sha256"] == {"digits": hashlib.sha256(whole).hexdigest()}


def test_embedded_digits_are_told_apart_by_their_pixels():
    mnist = sets.mnist(None, True)
    means = np.stack([mnist.x_train[mnist.y_train == digit].mean(axis=0) for digit in range(10)])  # [10, 28, 28]
    distance = ((mnist.x_test[:, None].astype(float) - means) ** 2).sum(axis=(2, 3))
    assert np.mean(distance.argmin(axis=1) == mnist.y_test) > 0.8


def test_embedded_text_is_pythons_own_split_in_ten_and_the_same_every_time():
    from pydoc_data.topics import topics

    ptb = sets.ptb(None, True)
    words = sum(map(len, ptb[:3]))
    assert np.cumsum([len(part) for part in ptb[:3]]).tolist() == [words * 8 // 10, words * 9 // 10, words]
    assert all(part.dtype == np.int32 and part.min() >= 0 for part in ptb[:3])
    assert 1000 < len(ptb.vocabulary) == len(set(ptb.vocabulary)) <= 10_000
    assert {"<eos>", "<unk>", "the", "python"} <= set(ptb.vocabulary)
    text = "\n".join(topics[name] for name in sorted(topics))
    assert ptb.facts["sha256"] == {"pydoc_data.topics": hashlib.sha256(text.encode()).hexdigest()}
    assert np.array_equal(ptb.train, sets.ptb(None, True).train)


# words


def test_vocabulary_is_ordered_by_count_then_word_and_counts_the_rest_as_unk():
    words = ["b", "b", "b", "a", "a", "c", "c", "d", "e", "<unk>"]
    assert sets.build_vocabulary(words) == ["b", "a", "c", "<unk>", "d", "e"]
    assert sets.build_vocabulary(words, 4) == ["<unk>", "b", "a", "c"]
    assert sets.build_vocabulary(["c", "b", "a"], 2) == ["<unk>", "a"]
    assert sets.build_vocabulary(["a"]) == ["a", "<unk>"]


def test_words_that_are_not_in_the_vocabulary_become_unk():
    ids = sets.encode(["a", "z", "b", "<unk>"], ["b", "<unk>", "a"])
    assert ids.tolist() == [2, 1, 0, 1] and ids.dtype == np.int32


# synthetic


def test_random_words_are_as_many_as_ptbs_of_the_whole_vocabulary_and_the_same_every_time():
    text = sets.random_words(35000, seed=1)
    assert [len(part) for part in text[:3]] == [929_589, 73_760, 82_430]
    assert (text.train.dtype, text.train.min(), text.train.max()) == (np.int32, 0, 34999)
    assert np.abs(np.bincount(text.train) - 929_589 / 35000).max() < 40, "alike"
    np.testing.assert_array_equal(text.train, sets.random_words(35000, seed=1).train)
    assert text.facts["source"] == "generated" and text.facts["seed"] == 1


def test_synthetic_set_is_split_balanced_and_repeatable():
    first, again, other = sets.synthetic(), sets.synthetic(seed=0), sets.synthetic(seed=1)
    assert [len(part) for part in first[:6]] == [8000, 8000, 1000, 1000, 1000, 1000]
    assert first.x_train.shape[1:] == (10, 2) and first.x_train.dtype == np.float32
    assert first.y_test.dtype == np.int32 and set(first.y_test) == {0, 1}
    assert all(0.45 < labels.mean() < 0.55 for labels in first[1:6:2])
    assert np.array_equal(first.x_test, again.x_test) and np.array_equal(first.y_test, again.y_test)
    assert not np.array_equal(first.x_test, other.x_test)


def test_synthetic_labels_follow_the_formula_but_for_the_stated_noise():
    """Written out step by step from the docstring's formula."""
    found = sets.synthetic(500, time_steps=6, seed=3)
    x = np.concatenate([found.x_train, found.x_valid, found.x_test])
    y = np.concatenate([found.y_train, found.y_valid, found.y_test])
    differ = 0
    for sequence, label in zip(x.astype(float), y, strict=True):
        total, previous = 0.0, 0.0
        for a, b in sequence:
            total += a * previous + 0.5 * np.sin(np.pi * b)
            previous = b
        differ += (total > 0) != label
    assert differ / 500 == pytest.approx(found.facts["label_noise"], abs=1e-4)
    assert 0.02 < found.facts["label_noise"] < 0.06


def test_synthetic_task_is_out_of_reach_of_a_linear_model():
    found = sets.synthetic()
    flat = [np.c_[x.reshape(len(x), -1), np.ones(len(x))] for x in (found.x_train, found.x_test)]
    weights = np.linalg.lstsq(flat[0], found.y_train - 0.5, rcond=None)[0]
    assert 0.6 < np.mean((flat[1] @ weights > 0) == found.y_test) < 0.75


@pytest.mark.parametrize(("num_sequences", "time_steps"), [(9, 10), (100, 1)])
def test_synthetic_set_that_is_too_small_is_a_user_error(num_sequences, time_steps):
    with pytest.raises(UserError, match="expected 10 of 2 or more"):
        sets.synthetic(num_sequences, time_steps)


# the published sets

real = pytest.mark.skipif(
    not os.path.isdir(os.environ.get(ENVIRONMENT, "")),
    reason=f"{ENVIRONMENT} does not name a folder with the real MNIST and PTB",
)


@real
def test_real_mnist_has_its_published_shape_and_statistics():
    mnist = sets.mnist()
    assert mnist.facts["source"] == "real" and mnist.facts["where"] == ENVIRONMENT
    assert mnist.x_train.shape == (60_000, 28, 28) and mnist.x_test.shape == (10_000, 28, 28)
    assert mnist.y_train.shape == (60_000,) and mnist.y_test.shape == (10_000,)
    assert mnist.x_train.mean() / 255 == pytest.approx(0.13066, abs=5e-6)
    assert mnist.x_train.std() / 255 == pytest.approx(0.30811, abs=5e-6)
    assert mnist.y_train[:5].tolist() == [5, 0, 4, 1, 9]


@real
def test_real_ptb_has_its_published_numbers_of_words():
    ptb = sets.ptb()
    assert ptb.facts["source"] == "real"
    assert [len(part) for part in ptb[:3]] == [929_589, 73_760, 82_430]
    assert len(ptb.vocabulary) == 10_000 and ptb.vocabulary[:4] == ["the", "<unk>", "<eos>", "N"]
    assert max(part.max() for part in ptb[:3]) == 9_999
    assert " ".join(ptb.vocabulary[word] for word in ptb.test[:7]) == "no it was n't black monday <eos>"
    inputs, _ = language_model_batches(ptb.train, 20, 35)
    assert len(inputs) == (929_589 // 20 - 1) // 35
