"""What can be said of a model's file without TensorFlow: that it is none, is cut off, or holds what safe mode refuses.

Standard library alone, so that a wrong file ends in one line at once. Nothing of the file is executed.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.errors import UserError

CONFIG, METADATA = "config.json", "metadata.json"  # in a .keras file, which is a zip
CONFIG_LIMIT = 256 * 2**20  # bytes of one of the two: Keras' largest have some MB
HDF5 = b"\x89HDF\r\n\x1a\n"
SUFFIXES = (".keras", ".h5", ".hdf5")
FUNCTION = re.compile(r"(?P<module>[\w./-]+):(?P<function>[A-Za-z_]\w*)")
EXPECTED = "expected a file of model.save('model.keras'), or module:function that builds the model"


def is_function(given: str) -> bool:
    """Whether a command line names `module:function` or `file.py:function`, and no file."""
    return FUNCTION.fullmatch(given) is not None and not Path(given).exists()


def check(path: str) -> dict[str, Any]:
    """The config of a model's file, {} of an HDF5 one, which Keras reads.

    Raises:
        UserError: it is not there, no file of Keras', truncated, of a newer Keras, or has Lambda layers.
    """
    file = Path(path)
    if not file.exists():
        raise UserError(f"{path}: no such file; {EXPECTED}")
    if file.is_dir():
        raise UserError(f"{path}: a folder; {EXPECTED}: a SavedModel holds no Keras layers")
    if file.name.endswith((".weights.h5", ".weights.json")):
        raise UserError(f"{path}: weights alone, no model; {EXPECTED}")
    try:
        with file.open("rb") as opened:
            begin = opened.read(8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {EXPECTED}") from None
    if not file.name.endswith(SUFFIXES):
        raise UserError(f"{path}: not a .keras file by its name; {EXPECTED}")
    if begin == HDF5 and not path.endswith(".keras"):
        return {}
    if not zipfile.is_zipfile(file):
        what = "truncated: it begins as a .keras file and has no end; copy it anew" if begin[:2] == b"PK" else ""
        raise UserError(f"{path}: {what or f'not a file of Keras: {EXPECTED}'}")
    config, about = (_json(file, name) for name in (CONFIG, METADATA))
    _check_version(path, str(about.get("keras_version", "")))
    _check_lambdas(path, config)
    return config


def _json(file: Path, name: str) -> dict:
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.getinfo(name).file_size > CONFIG_LIMIT:
                raise UserError(f"{file}: {name} has over {CONFIG_LIMIT >> 20} MB: not a file of Keras; {EXPECTED}")
            found = json.loads(archive.read(name))
    except KeyError:
        raise UserError(f"{file}: a zip without {name}, not a file of Keras; {EXPECTED}") from None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RecursionError, RuntimeError) as error:
        words = " ".join(str(error).split())[:150]
        raise UserError(f"{file}: damaged, its {name} cannot be read ({words}); copy it anew") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: its {name} is no object, not a file of Keras; {EXPECTED}")
    return found


def _check_version(path: str, saved: str) -> None:
    """Files are opened by the minor version that wrote them or a later one: what an earlier one does not know it may drop."""
    try:
        installed = metadata.version("keras")
    except metadata.PackageNotFoundError:
        return
    numbers = [tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (saved, installed)]
    if numbers[0] > numbers[1]:
        raise UserError(
            f"{path}: saved by Keras {saved}, installed is {installed}; install keras=={saved}, or save it with {installed}"
        )


def _check_lambdas(path: str, config: dict) -> None:
    for found in objects(config):
        if found.get("class_name") == "Lambda" and "__lambda__" in json.dumps(found.get("config")):
            raise UserError(
                f"{path}: {name_of(found)} is a Lambda layer with Python code, which safe mode does not load; make it a layer of "
                "keras.ops or a registered class, or give module:function that builds the model and loads its weights"
            )


def objects(config: Any) -> Iterator[dict]:
    """Every serialized object of a config, outermost first; without recursion, however deep."""
    todo = [config]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            if isinstance(found.get("class_name"), str):
                yield found
            todo += reversed(found.values())
        elif isinstance(found, list):
            todo += reversed(found)


def custom(config: dict) -> list[str]:
    """The registered names of the classes and functions that are not Keras' own, in a file's order, each once."""
    names = (
        found.get("registered_name") or found["class_name"]
        for found in objects(config)
        if not str(found.get("module") or "").startswith(("keras", "builtins")) and not _is_plain(found["class_name"])
    )
    return list(dict.fromkeys(names))


def _is_plain(name: str) -> bool:
    return name.startswith("__")  # "__keras_tensor__" and its like


def name_of(found: dict) -> str:
    """The layer's own name, as the user gave it."""
    config = found.get("config")
    return str(config.get("name", "a layer")) if isinstance(config, dict) else "a layer"


def mentions_bfloat16(config: dict) -> bool:
    """Whether a model of this config may compute in bfloat16."""
    return "bfloat16" in json.dumps(config)
