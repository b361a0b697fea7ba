"""What is fuzzed: each target makes an input from good ones and feeds it to what a run does with such an input."""

import gzip
import io
import json
import random
import shlex
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401 - before the memory is counted
import tabulate  # noqa: F401
from matplotlib.backends import backend_agg  # noqa: F401

from harness.compare import __main__ as compare
from harness.compare import compared, pairing
from harness.data import sets
from harness.measure import references
from harness.record import intervals, records, schema
from harness.report import plots, tables
from harness.run import jobs, options, suite
from models.weights import canonical
from tests import record_cases
from tests.fuzz import mutations
from tests.fuzz.mutations import Random

PROJECT = Path(__file__).resolve().parents[2]
# What stands after a header's NAME =: what Python takes, what it refuses, and what it must not get to execute.
HEADER_VALUES = ["None", "True", "-1", "1e999", "-1e999", "1/0", "1/3", "9**9**9", "'a'*10**9", "0x" + "f" * 400,
                 "1" * 5000, "()", "{}", "{'small': dict(UNITS=200)}", "{'small': 1}", "dict(**{'a': 1})",
                 "dict(a=dict(b=1))", "{1: {}}", "{**{}}", "[1] * 3", "__import__('os').system('true')",
                 "exec('1')", "lambda: 0", "f'{1}'", "b'x'", "1j", "float('nan')", "{1, 2}", "...", "'\\ud800'",
                 "'a\\nb'", "'\\0'", "'''a\nb'''", "-" * 3000 + "1", "(" * 90 + "1" + ")" * 90,
                 "[" * 300 + "]" * 300, "1 + 1", "1 +" * 3000 + "1", "1 /" * 3000 + "1", "'x' 'y'", "x := 1",
                 "await x", "*a", "1 if 1 else 2", "''", "'" + "x" * 5000 + "'", "8", "0.5", "'small'", "'all'"]  # fmt: skip
MEASURED = sorted(layout for run in record_cases.RUNS for layout in run.glob("layout/*.json"))


class Target:
    """One kind of input. `refusals`: what may be raised besides UserError."""

    refusals: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path):
        self.folder = folder

    def make(self, chance: Random) -> Any:
        raise NotImplementedError

    def feed(self, content: Any) -> None:
        raise NotImplementedError

    def show(self, content: Any) -> str:
        """The input as it stands in a report."""
        return repr(content)


class Records(Target):
    """Rows as they stand in rows/: read, and those that are taken are drawn, 20 at a time with their plots."""

    TOGETHER = 20

    def __init__(self, folder: Path):
        super().__init__(folder)
        layouts = {path: json.loads(path.read_text()) for path in MEASURED}
        self.good = [(record_cases.make(), next(layout for path, layout in layouts.items() if path.stem == "ptb"))]
        chance = random.Random(1)
        for path, layout in layouts.items():
            rows = sorted((path.parents[1] / "rows").glob(f"{path.stem}.*.json"))
            self.good += [(json.loads(row.read_text()), layout) for row in chance.sample(rows, min(5, len(rows)))]
        self.taken: dict[str, list[dict]] = {}
        self.layouts = {layout["benchmark"]: layout for layout in layouts.values()}

    def make(self, chance: Random) -> bytes:
        good, _ = chance.choice(self.good)
        changed = mutations.changed_json(chance, good) if chance.random() < 0.95 else good
        return mutations.json_bytes(chance, changed)

    def feed(self, content: bytes) -> None:
        path = self.folder / "row.json"
        path.write_bytes(content)
        record = records.read_record(path)
        records.record_name(record)
        self.draw(record)

    def draw(self, record: dict) -> None:
        known = record["benchmark"] if record["benchmark"] in self.layouts else "ptb"
        together = self.taken.setdefault(known, [])
        together.append({**record, "benchmark": known})
        if len(together) == self.TOGETHER:
            self.taken[known] = []
            draw_run(self.folder / "run", self.layouts[known], together)


def draw_run(run: Path, layout: dict, rows: list[dict]) -> None:
    """All that a run's tables are: pages, headline, index and, of the first table that has one, the plot."""
    text, drawn = tables.page(layout, rows)
    assert all(record["row"] in text for record in rows if record["mode"] in [t["mode"] for t in layout["tables"]][:1])
    for table in drawn[:1]:
        plots.draw(table.title, table.axis, table.bars, table.caption)
    tables.headline_of(layout, rows)
    tables.index_page(run, {layout["benchmark"]: (layout, rows)}, ["a problem"])


class Compared(Records):
    """Rows as they stand in rows/ of a second run: those that are taken are compared with good ones."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.options = compare.parse(["before", "after"])
        blocks = [[10.0 + number / 10, 10.1] for number in range(5)]
        rows = ("keras", "keras_cudnn", "while_loop")
        made = [record_cases.make(row=row, blocks_ms=blocks, step_ms=intervals.step_of(blocks)) for row in rows]
        self.before = made
        self.good = [(row, {}) for row in made]

    def draw(self, record: dict) -> None:
        both = self.before, [record, *(row for row in self.before if row["row"] != record["row"])]
        pairs = pairing.pair(*both, None, ("before", "after"))
        shifts, means = pairing.judge(pairs, self.options.drift)
        compared.page(self.options, both, pairs, shifts, means)
        compared.document(self.options, both, pairs, shifts, means, None)


class Layouts(Target):
    """Layouts as they stand in layout/: those that are taken draw a run of good records."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.good = [json.loads(path.read_text()) for path in MEASURED]
        self.rows = [
            [json.loads(row.read_text()) for row in sorted((path.parents[1] / "rows").glob(f"{path.stem}.*.json"))[:4]]
            for path in MEASURED
        ]

    def make(self, chance: Random) -> tuple[int, bytes]:
        which = chance.randrange(len(self.good))
        changed = mutations.changed_json(chance, self.good[which]) if chance.random() < 0.95 else self.good[which]
        return which, mutations.json_bytes(chance, changed)

    def feed(self, content: tuple[int, bytes]) -> None:
        path = self.folder / "layout.json"
        path.write_bytes(content[1])
        layout = tables.read_layout(path)
        rows = self.rows[content[0]]
        tables.page(layout, rows)
        tables.headline_of(layout, rows)


class Runs(Target):
    """run.json and matmul.json, whatever else stands in the folder."""

    GOOD = ({"schema": schema.SCHEMA, "created": "2026-01-31T10:00:00+00:00"}, {"gpu.tf32": 3.1e14, "gpu.fp16": None})

    def make(self, chance: Random) -> tuple[int, bytes]:
        which = chance.randrange(2)
        return which, mutations.json_bytes(chance, mutations.changed_json(chance, self.GOOD[which], changes=1))

    def feed(self, content: tuple[int, bytes]) -> None:
        path = self.folder / ("run.json", "matmul.json")[content[0]]
        path.write_bytes(content[1])
        if content[0] == 0:
            assert records.check_run(self.folder)["schema"] == schema.SCHEMA
        else:
            found = records.read_figures(path)
            assert all(isinstance(key, str) and (value is None or value < 1e300) for key, value in found.items())


class Idx(Target):
    """MNIST's files: changed as they are, or before they were compressed, by gzip or what else is at hand."""

    SHAPES = ((5, 3, 2), (40,))

    def make(self, chance: Random) -> tuple[tuple[int, ...], bytes]:
        shape = chance.choice(self.SHAPES)
        counts = b"".join(size.to_bytes(4, "big") for size in shape)
        plain = bytes([0, 0, 8, len(shape)]) + counts + bytes(index % 10 for index in range(np.prod(shape)))
        kind = chance.randrange(10)
        if kind < 4:
            plain = mutations.changed_bytes(chance, plain)
        elif kind == 4:
            plain += bytes(chance.choice([1, 1000, 3 * 2**20]))  # a bomb: thousands of times its size
        packed = gzip.compress(plain, compresslevel=chance.choice([0, 1, 9]), mtime=0)
        if kind == 5:
            packed += packed
        elif kind == 6:
            packed = gzip.compress(packed, mtime=0)
        return shape, mutations.near(chance, lambda: packed) if kind > 6 else packed

    def feed(self, content: tuple[tuple[int, ...], bytes]) -> None:
        shape, raw = content
        array = sets.parse_idx(self.folder / "t10k-images-idx3-ubyte.gz", raw, shape)
        assert array.shape == shape and array.dtype == np.uint8


class Text(Target):
    """PTB's files."""

    GOOD = "a lazy dog \n <unk> jumps over N $ mr. \u00e9t\u00e9 \U0001f600 \n no it was n't \n".encode()

    def make(self, chance: Random) -> bytes:
        kind = chance.randrange(10)
        if kind == 0:
            return chance.randbytes(chance.choice([0, 1, 10, 1000]))
        if kind == 1:
            return chance.choice(
                [b" ", b"\n", b"\0", b"a ", b"\xff", b"a\n", "\u2028".encode(), b"a" * 99]
            ) * chance.choice([1, 9_999])
        return mutations.near(chance, lambda: self.GOOD * chance.choice([1, 3, 30]))

    def feed(self, content: bytes) -> None:
        words = sets.parse_text(self.folder / "ptb.train.txt", content)
        vocabulary = sets.build_vocabulary(words)
        ids = sets.encode(words, vocabulary)
        assert len(ids) == len(words) and ids.min() >= 0 and ids.max() < len(vocabulary) <= sets.VOCABULARY


class CommandLines(Target):
    """Options of the suite and of its scripts, as in `run_all.sh --units=64`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.headers = jobs.read_headers(suite.BENCHMARKS)
        self.names = sorted({name for header in self.headers.values() for name in header.constants})
        self.texts = ["1", "0", "8", "64", "0.5", "1e-3", "true", "fp32", "keras", "all", "small", "large",
                      "mnist,ptb", "1%", "cpu", "-1", "1e999", "nan", "9" * 5000, "0x10", "1_000", " 1 ", "a,,b",
                      ",", "\u0661", *mutations.TEXTS]  # fmt: skip
        self.flags = [*options.FLAGS, *jobs.OWN_FLAGS, "train", "only", *options.SETTINGS]

    def make(self, chance: Random) -> list[str]:
        words = []
        for _ in range(chance.choice([1, 1, 2, 3, 8])):
            name = chance.choice(self.names + self.flags).lower().replace("_", chance.choice("-_"))
            if chance.random() < 0.1:
                name = mutations.changed_bytes(chance, name.encode()).decode("utf-8", "surrogateescape")
            value = chance.choice(self.texts) if chance.random() < 0.3 else self.fitting(chance, name)
            words += chance.choice([[f"--{name}={value}"]] * 4 + [[f"--{name}", value], [f"--{name}"], [value]])
        return words

    def fitting(self, chance: Random, name: str) -> str:
        """A value that the constant or setting may have."""
        key = name.upper().replace("-", "_")
        limits = [header.limit(key) for header in self.headers.values() if key in header.constants]
        limit = chance.choice(limits) if limits else options.SETTINGS.get(key.lower(), (None,))[0]
        return str(chance.choice(limit.choices or (limit.example,))) if limit else chance.choice(self.texts)

    def feed(self, content: list[str]) -> None:
        found, chosen = jobs.parse(content, self.headers)
        for preset in jobs.PRESETS:
            for job in jobs.plan(found, chosen, self.headers, preset):
                header = self.headers[job.name]
                given = options.parse(header, job.arguments, jobs.SCRIPT_FLAGS.get(job.name, {}))
                constants = options.resolve(header, given, preset)
                assert "\n" not in options.echo(constants, header, preset)
                json.dumps(constants, allow_nan=False)
        options.rows(str(found.values.get("ROWS", "all")), ["keras", "keras_cudnn"])

    def show(self, content: list[str]) -> str:
        return shlex.join(content)


class Headers(Target):
    """Scripts whose header was edited by hand: values that Python may read, lines that it may not."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.good = [(suite.BENCHMARKS / f"{name}.py").read_text() for name in jobs.read_headers(suite.BENCHMARKS)]

    def make(self, chance: Random) -> bytes:
        text = chance.choice(self.good)
        end = text.index("# ---", text.index("# ---") + 90) + 80  # the second rule
        header, rest = text[:end], "\nraise SystemExit('was executed')\n" + text[end:]
        if chance.random() < 0.5:
            return mutations.near(chance, (header + rest).encode, share=0.02)
        lines = header.split("\n")
        for _ in range(chance.choice([1, 1, 2])):
            places = [place for place, line in enumerate(lines) if line[:1].isupper() and " = " in line]
            if not places:
                break
            place, value = chance.choice(places), chance.choice(HEADER_VALUES)
            name = lines[place].split(" = ")[0]
            change = [f"{name} = {value}  # {lines[place][-20:]}", f"{name} = {value}", f"X_{name} = {value}",
                      f"{name}: int = {value}", f"{name} += {value}", f"{name}, B = {value}",
                      f"if {value}: {name} = 1", "# ------", f"{name} = {value}; B = 2", ""]  # fmt: skip
            lines[place] = chance.choice(change[:2] if chance.random() < 0.6 else change)
        return ("\n".join(lines) + rest).encode("utf-8", "surrogatepass")

    def feed(self, content: bytes) -> None:
        path = self.folder / "script.py"
        path.write_bytes(content)
        header = options.read_header(path)
        for preset in (None, "quick", "full"):
            constants = options.resolve(header, options.Options(), preset)
            assert "\n" not in options.echo(constants, header, preset)
        options.help_text(header, "A script.")


class WeightFiles(Target):
    """References (.npz): changed bytes, members and headers; what is read has to be the canonical form or is refused."""

    refusals = (ValueError,)  # of models.weights.canonical.check, in one line

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.shapes = canonical.lstm_shapes(3, 2, 1)
        self.good = {f"weights|{name}": array for name, array in canonical.large_random(self.shapes, 1).items()}
        self.good |= {"losses|": np.arange(3.0), "outputs|logits": np.ones((2, 3), np.float32).T}

    def make(self, chance: Random) -> bytes:
        members = {}
        for name, array in self.good.items():
            stream = io.BytesIO()
            np.lib.format.write_array(stream, array)
            members[f"{name}.npy"] = stream.getvalue()
        changed = chance.choice([*members])
        kind = chance.randrange(10)
        if kind < 2:
            members[changed] = mutations.changed_bytes(chance, members[changed])
        elif kind < 5:
            members[changed] = header_of(chance) + members[changed][128:]
        elif kind == 5:
            renamed = chance.choice(
                [*mutations.TEXTS[:20], "../../x|y.npy", "/x|y.npy", "losses|y.npy", "weights|.npy", "a|b|c.npy"]
            )
            members[renamed[:500].encode("utf-8", "replace").decode()] = members.pop(changed)
        elif kind == 6:
            members[changed] += bytes(chance.choice([1, 1000, 3 * 2**20]))
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, content in members.items():
                how = zipfile.ZIP_DEFLATED if name == changed and kind in (6, 7) else zipfile.ZIP_STORED
                archive.writestr(zipfile.ZipInfo(name), content, how)
        return mutations.near(chance, packed.getvalue, share=0.2) if kind > 7 else packed.getvalue()

    def feed(self, content: bytes) -> None:
        path = self.folder / "reference.npz"
        path.write_bytes(content)
        found = references.load_reference(path)
        size = sum(
            array.nbytes
            for value in found.values()
            for array in (value.values() if isinstance(value, dict) else [value])
        )
        assert size <= len(content)
        canonical.check(found.get("weights", {}), self.shapes)


def header_of(chance: Random) -> bytes:
    """A header of NumPy's format that says anything."""
    dtype = chance.choice(
        ["'<f4'", "'|O'", "'<f8'", "'<U9999999'", "'<c16'", "'|V5'", "'<i8'", "'<m8[s]'", "[('a', '<f4')]", "''", "1"]
    )
    shapes = ["(3, 8)", "(999999999999,)", "(-1,)", "(0,)", "()", "(2**9,)", "(1,)*64", "((1,),)", "3", "(True,)",
              "(1e9,)", "(" * 200 + ")" * 200, f"({'9' * 400},)", "(24,)", "(8,)", f"({'1, ' * 70})"]  # fmt: skip
    shape = chance.choice(shapes)
    fortran = chance.choice(["False", "True", "0", "'x'"])
    text = chance.choice(
        ["{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}", "{{'descr': {}, 'shape': {}}}", "{}{}{}", "{{"]
    )
    text = text.format(dtype, fortran, shape)[:9000]
    size = chance.choice([len(text) + 1, 118, 0, 65535])
    return (
        b"\x93NUMPY"
        + bytes(chance.choice([(1, 0), (1, 0), (2, 0), (3, 0), (9, 9)]))
        + size.to_bytes(2, "little")
        + f"{text:<117}\n".encode()
    )


TARGETS = {
    "records": Records,
    "compared": Compared,
    "layouts": Layouts,
    "runs": Runs,
    "idx": Idx,
    "text": Text,
    "command_lines": CommandLines,
    "headers": Headers,
    "weight_files": WeightFiles,
}
