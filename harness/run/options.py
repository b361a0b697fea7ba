"""A benchmark script's header of hyperparameters as command-line options and resolved constants.

The header stands between two rules `# -----`: plain UPPER_CASE names, a literal each, a comment after each (an
indented comment below continues it). It is read, never executed. Two tables may stand in it: CONFIGS, the published
configurations, and PRESETS, `quick` and `full`. A constant that they govern is None in the header as shipped, so that
any other value there was written by the user. What the user wrote comes first, then the preset, then the config.
"""

import ast
import dataclasses
import difflib
import io
import json
import os
import re
import textwrap
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import UserError
from harness.record.settings import EXCEPTIONS
from harness.run.limits import LIMITS, Limit, Percentage, known_limit

NO_TF32 = "--precision=tf32: a CPU has no TensorFloat-32; expected fp32, fp16 or bf16 with --device=cpu"
FLAGS = {
    "help": "print this text",
    "list": "print the names of the rows",
    "quick": "the quick preset: real numbers in minutes",
    "full": "the full preset: the published protocol",
    "resume": "keep the finished rows of the run in --out, or else of today's latest, and add what is missing",
}
SETTINGS = {
    "out": (Limit(str, example="results/mine"), "folder for the records and tables"),
    "data": (Limit(str, example="data"), "folder of the data sets, or embedded"),
    "device": (Limit(str, choices=("gpu", "cpu")), "gpu or cpu"),
    "repeat_until": (
        Percentage(float, low=1e-4, high=1, example="1%"),
        "add processes to a row until its 95 % interval reaches no further than this to either side, or its time is up",
    ),
    "at_once": (
        Limit(int, low=1, high=64, example=4),
        "processes that prepare side by side; what is timed is timed alone. By default 1 on a CPU, on a GPU as its memory allows",
    ),
    "gpus": (
        Limit(int, low=1, high=64, example=2),
        "GPUs of this host that rows are spread over, each row on one of them; by default 1",
    ),
}

_TABLES = ("CONFIGS", "PRESETS")
_WIDTH = 100


@dataclass(frozen=True)
class Constant:
    """One line of a header: its value (None where a preset or config governs it), the comment after it, its line."""

    default: object
    comment: str
    line: int


@dataclass(frozen=True)
class Header:
    """The constants of a script by name, in the order of the script."""

    path: str
    constants: dict[str, Constant]

    @property
    def configs(self) -> dict[str, dict]:
        return self.constants["CONFIGS"].default if "CONFIGS" in self.constants else {}

    @property
    def presets(self) -> dict[str, dict]:
        return self.constants["PRESETS"].default if "PRESETS" in self.constants else {}

    def limit(self, name: str) -> Limit | None:
        """What the constant may be, from LIMITS or else from its value; None for a table, edited in the header only."""
        default = self.constants[name].default
        if name == "CONFIG" and self.configs:
            return dataclasses.replace(LIMITS[name], choices=tuple(self.configs))
        if known := known_limit(name):
            return known
        if name in _TABLES or isinstance(default, dict | list | tuple):
            return None
        return Limit(type(default), example=default)


class Constants(dict):
    """Resolved constants by name. Raises UserError where the script asks for one that the header lacks."""

    def __init__(self, header: Header, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self._header = header

    def __missing__(self, name: str) -> object:
        raise UserError(f"{self._header.path}: the header lacks {name}; restore it")


@dataclass
class Options:
    """What stands on the command line: constants by header name, the flags given, and the settings."""

    values: dict[str, object] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    out: str | None = None
    data: str | None = None
    device: str | None = None
    repeat_until: float | None = None  # a fraction
    at_once: int | None = None
    gpus: int | None = None
    written: list[str] = field(default_factory=list)  # all of it as --name=value or --flag, which `parse` takes again

    @property
    def preset(self) -> str | None:
        """`quick`, `full`, or None where the machine decides."""
        return next((name for name in ("quick", "full") if name in self.flags), None)


def read_header(path: str | os.PathLike) -> Header:
    """Read the constants between the first two rules of a script.

    Raises UserError, with path and line, for a value that is no literal or outside its limit, for a line that is no
    `NAME = value`, for a constant that neither the harness nor the script below knows, and for a config or preset that sets an
    unknown constant.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        line, message = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise UserError(f"{path}:{line}: not valid Python: {_show(message)}") from None
    lines = source.split("\n")
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    rules = [line for line in comments if re.fullmatch(r"# ?-{5,}\s*", lines[line - 1])]
    if len(rules) < 2:
        raise UserError(f"{path}: expected a header between two lines `# -----`, found {len(rules)} such lines")
    constants: dict[str, Constant] = {}
    for node in tree.body:
        if not rules[0] < node.lineno < rules[1]:
            continue
        where = f"{path}:{node.lineno}: "
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) and len(node.targets) == 1 else ""
        if not re.fullmatch("[A-Z][A-Z0-9_]*", name):
            raise UserError(f"{where}expected NAME = value in the header, the name in capitals")
        if name in constants:
            raise UserError(f"{where}{name} is set already in line {constants[name].line}; keep one")
        line = node.lineno if node.lineno in comments else node.end_lineno
        comment = [comments.get(line, "")]
        while comment[0] and line + 1 in comments and re.match(r"\s+#", lines[line]):
            line += 1
            comment.append(comments[line])
        text = " ".join(part.lstrip("# ").rstrip() for part in comment)
        try:
            value = _literal(node.value)
            json.dumps(value, allow_nan=False)  # every constant goes into a record
        except (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError):
            expected = "a plain value: a number, a text, True, False, None, or a list or dict of them"
            raise UserError(f"{where}{name}: expected {expected}") from None
        pairs = [*value.items()] if isinstance(value, dict) else [("", value)]
        if name in _TABLES and any((type(entry), type(values)) != (str, dict) for entry, values in pairs):
            raise UserError(f"{where}{name}: expected a dict of dicts, such as {{'small': dict(UNITS=256)}}")
        constants[name] = Constant(value, text, node.lineno)
    below = [node for statement in tree.body if statement.lineno > rules[1] for node in ast.walk(statement)]
    _check_read(str(path), constants, below)
    return _validate(Header(str(path), constants))


def _check_read(path: str, constants: Mapping[str, Constant], below: Sequence[ast.AST]) -> None:
    """Each constant is named by the script's code below its header, or read by the harness in every script that has it."""
    names = (getattr(node, kind, None) for node in below for kind in ("id", "attr", "value"))
    read = {name for name in names if isinstance(name, str)}
    made = {node.id for node in below if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    lacking = [name for name in LIMITS if name in read - made and name not in constants]
    for name, constant in constants.items():
        if name not in read and name not in EXCEPTIONS:
            hint = _hint(name, [*lacking, *constants.keys() - {name}])
            if lacking and hint == ".":
                hint = f"; the header lacks {lacking[0]}."
            raise UserError(f"{path}:{constant.line}: nothing reads {name}{hint}")


def _literal(node: ast.expr) -> object:
    """The value of a literal, and of `dict(UNITS=200)` and `1 / 1.15`, which ast.literal_eval refuses."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _literal(node.left) / _literal(node.right)
    return ast.literal_eval(node)


def _validate(header: Header) -> Header:
    """Check every value, those of the tables included, against its limit."""
    settings = []
    for name, constant in header.constants.items():
        where = f"{header.path}:{constant.line}: "
        entries = constant.default.items() if name in _TABLES else ()
        settings += [(f"{where}{name}[{entry!r}]: ", *item) for entry, values in entries for item in values.items()]
        settings += [(where, name, constant.default)] if name not in _TABLES else []
    for where, name, value in settings:
        if name not in header.constants or name in _TABLES:
            raise UserError(
                f"{where}{_show(name)} is no constant of the header{_hint(str(name), list(header.constants))}"
            )
        if header.constants[name].default is None and known_limit(name) is None:
            raise UserError(f"{where}{name} = None: its type is not known; add it to LIMITS in harness/run/limits.py")
        try:
            if value is not None and (limit := header.limit(name)):
                limit.check(value)
        except ValueError as error:
            raise UserError(f"{where}{name} = {_show(repr(value))}: expected {error}") from None
    return header


def parse(header: Header, argv: Iterable[str], flags: Mapping[str, str] | None = None) -> Options:
    """Read a command line: `--NAME=value` or `--name value` in any case, - or _; of duplicates the last one counts.

    `flags` are the script's own, with their help: {"train": "run the whole schedule"}. Raises UserError.
    """
    known_flags = {**FLAGS, **(flags or {})}
    names = {name.lower(): name for name in header.constants}
    for name in names.keys() & {*known_flags, *SETTINGS}:
        where = f"{header.path}:{header.constants[names[name]].line}"
        raise UserError(f"{where}: {names[name]}: --{name} is an option already; give the constant another name")
    options, rest = Options(), list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if not argument.startswith("--") or argument == "--":
            raise UserError(f"{_show(argument) or repr('')}: expected options only, each as --name=value. See --help")
        written, equals, text = argument[2:].partition("=")
        key = written.lower().replace("-", "_")
        option = f"--{_show(key.replace('_', '-'))}"
        if key in known_flags:
            if equals:
                raise UserError(f"{option}={_show(text)}: {option} takes no value; write {option} alone")
            options.flags.add(key)
            options.written.append(f"--{key.replace('_', '-')}")
            continue
        if key not in names and key not in SETTINGS:
            spelled = [name.replace("_", "-") for name in (*names, *SETTINGS, *known_flags)]
            raise UserError(f"--{_show(written)}: no such option{_hint(option[2:], spelled, '--')} See --help")
        limit = SETTINGS[key][0] if key in SETTINGS else header.limit(names[key])
        if limit is None:
            raise UserError(f"{option}: a table cannot be given as an option; edit {names[key]} in {header.path}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{option}: a value is missing; expected {limit.expected()}")
            text = rest.pop(0)
        try:
            value = limit.read(text)
        except ValueError as error:
            hint = _hint(text, limit.choices).rstrip(".")
            raise UserError(f"{option}={_show(text)}: expected {error}{hint}") from None
        options.written.append(f"--{key.replace('_', '-')}={text}")
        if key in SETTINGS:
            setattr(options, key, value)
        else:
            options.values[names[key]] = value
    if {"quick", "full"} <= options.flags:
        raise UserError("--quick and --full: expected one of them; leave the other out")
    return options


def _show(text: object) -> str:
    """What the user wrote, cut to a length and without control characters, so that a message is one line."""
    text = str(text)
    text = text if len(text) <= 60 else text[:57] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _hint(name: str, known: Sequence[str], prefix: str = "") -> str:
    """What of `known` is spelled most like it, for the end of a message."""
    near = difflib.get_close_matches(name[:60], known, 1, 0.65)  # cut: its cost grows with the square of the length
    return f"; did you mean {prefix}{near[0]}?" if near else "."


def resolve(header: Header, options: Options, preset: str | None) -> Constants:
    """Every constant by name: the command line's, the header's if not None, the preset's or the config's, or None."""
    defaults = {name: constant.default for name, constant in header.constants.items()}
    layers = [options.values, defaults, header.presets.get(preset, {})]

    def first(name: str) -> object:
        return next((layer[name] for layer in layers if layer.get(name) is not None), None)

    if header.configs:
        config = first("CONFIG")
        if config is None:
            raise UserError(f"--config: no config is set; expected one of {', '.join(header.configs)}")
        layers.append(header.configs[config])
    return Constants(header, {name: first(name) for name in header.constants})


def departs_from_protocol(constants: Mapping[str, object], protocol: Mapping[str, object]) -> list[str]:
    """Names whose value is not the published protocol's; where there are any, published columns are dropped."""
    return [name for name, value in protocol.items() if name not in constants or constants[name] != value]


def echo(resolved: Mapping[str, object], header: Header, preset: str | None = None) -> str:
    """One line of the constants that the user changed, or "": `overriding UNITS = 64 (was 1500)`.

    `preset` is the one that `resolve` was given. What a constant was is what preset, config or header set.
    """
    shipped = {name: constant.default for name, constant in header.constants.items()}
    shipped.update(header.configs.get(resolved.get("CONFIG"), {}), **header.presets.get(preset, {}))
    changed = [f"{n} = {value!r} (was {shipped[n]!r})" for n, value in resolved.items() if value != shipped[n]]
    return "overriding " + ", ".join(changed) if changed else ""


def rows(option: str, known: Iterable[str]) -> list[str]:
    """The rows that `--rows` names, comma-separated or `all`, once each and in the script's order. Raises UserError."""
    known, wanted = list(known), {name.strip() for name in option.split(",") if name.strip()}
    for name in sorted(wanted - {*known, "all"}):
        raise UserError(f"--rows={_show(name)}: no such row{_hint(name, known)} Known: {', '.join(known)}")
    if not wanted:
        raise UserError(f"--rows={_show(option)}: expected all or names, comma-separated, of {', '.join(known)}")
    return [name for name in known if name in wanted or "all" in wanted]


def help_text(header: Header, docstring: str | None, flags: Mapping[str, str] | None = None) -> str:
    """The first line of the script's docstring, its usage, and a table of options, defaults and comments."""
    values = {int: "N", float: "X", str: "NAME", bool: "true|false"}
    table = [(f"--{name}", "", text) for name, text in {**FLAGS, **(flags or {})}.items()]
    kinds = {"device": "NAME", "repeat_until": "X%", "at_once": "N", "gpus": "N"}
    table += [(f"--{n.replace('_', '-')}={kinds.get(n, 'DIR')}", "", text) for n, (_, text) in SETTINGS.items()]
    for name, constant in header.constants.items():
        option, default, text = f"--{name.lower().replace('_', '-')}", str(constant.default), constant.comment
        if limit := header.limit(name):
            described = limit.expected() + (f" ({limit.unit})" if limit.unit else "")
            table.append((f"{option}={values[limit.type]}", default, text or described))
        else:
            entries = ", ".join(map(str, constant.default))
            table.append((name, "", f"{entries}: edit in the script" + (f"; {text}" if text else "")))
    widths = [min(max(len(row[column]) for row in table), 36 - 18 * column) for column in (0, 1)]
    lines = []
    for option, default, text in table:
        default = default if len(default) <= widths[1] else default[: widths[1] - 3] + "..."
        start = f"  {option:{widths[0]}}  {default:{widths[1]}}  "
        lines.append(textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)).rstrip())
    title = textwrap.fill((docstring or "").strip().split("\n")[0], _WIDTH)
    script = "/".join(header.path.replace(os.sep, "/").split("/")[-2:])
    return "\n".join([title, "", f"usage: python {script} [--NAME=value ...]", "", *lines]).lstrip()
