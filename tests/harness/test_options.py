"""Headers, command lines and their resolution: harness/run/options.py."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.run import options as opt

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in ROOT.glob("benchmarks/*.py") if path.name != "__init__.py")
RULE = "# " + "-" * 75
BODY = """\
CONFIG = "large"            # one of CONFIGS
CONFIGS = {                 # Zaremba et al. 2014,
                            # as in the PTB tutorial
    "small": dict(UNITS=200, TIME_STEPS=20, CLIP_NORM=5),
    "large": dict(UNITS=1500, TIME_STEPS=35, CLIP_NORM=10, LR_DECAY=1 / 1.15),  # the published one
}
PRESETS = {"quick": {"EPOCHS": 1, "TIME_STEPS": 10}, "full": {"EPOCHS": 3}}
# a heading, no comment of PRESETS
UNITS = None                # LSTM units per layer; None: the config's
TIME_STEPS = None           # steps
EPOCHS = None               # None: the preset's
CLIP_NORM = None
LR_DECAY = None
DROPOUT_1 = 0.2             # after the first LSTM
KEEP_PROB = 1.0             # "# 1" keeps everything
BIDIRECTIONAL = True        # both directions
ROWS = "all"                # comma-separated names from --list
                            # or all of them
PRECISION = "tf32"          # fp32, tf32 or fp16
SIZES = [1, 2]              # a list
COUNT = 3                   # a name that LIMITS does not have
STAGED_BATCHES = 8
SEED = 1
"""


def write_script(folder, body=BODY):
    path = Path(folder, "ptb.py")
    read = f"print({', '.join({*re.findall('^[A-Z][A-Z0-9_]*', body, re.M)} - {'SEEDS', 'AFTERTHOUGHT', 'DROPOUT'})})"
    path.write_text(f'"""A language model.\n\n{RULE}\n"""\n{RULE}\n{body}{RULE}\n{read}\n', encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    return opt.read_header(write_script(tmp_path_factory.mktemp("script")))


def resolved(header, *argv):
    options = opt.parse(header, argv)
    return opt.resolve(header, options, options.preset)


def refusal(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# headers


def test_header_holds_the_names_between_the_rules_in_order(header):
    assert list(header.constants) == [line.split()[0] for line in BODY.splitlines() if line[:1].isupper()]


def test_header_holds_literal_defaults(header):
    assert header.constants["CONFIG"].default == "large"
    assert header.constants["UNITS"].default is None
    assert header.constants["DROPOUT_1"].default == 0.2
    assert header.configs["small"] == {"UNITS": 200, "TIME_STEPS": 20, "CLIP_NORM": 5}
    assert header.configs["large"]["LR_DECAY"] == 1 / 1.15
    assert header.presets["full"] == {"EPOCHS": 3}


@pytest.mark.parametrize(
    "name, comment",
    [
        ("CONFIG", "one of CONFIGS"),
        ("CONFIGS", "Zaremba et al. 2014, as in the PTB tutorial"),
        ("PRESETS", ""),
        ("KEEP_PROB", '"# 1" keeps everything'),
        ("ROWS", "comma-separated names from --list or all of them"),
        ("CLIP_NORM", ""),
    ],
)
def test_comment_after_a_constant_is_its_help(header, name, comment):
    assert header.constants[name].comment == comment


@pytest.mark.parametrize(
    "line, expected",
    [
        ("UNITS = 2 * 128", "UNITS: expected a plain value"),
        ("UNITS = 1 / 0", "UNITS: expected a plain value"),
        ("UNITS = open('x')", "UNITS: expected a plain value"),
        ("SIZES = {1, 2}", "SIZES: expected a plain value"),
        ("NOISE = 1e999", "NOISE: expected a plain value"),
        ("UNITS = {[]: 1}", "UNITS: expected a plain value"),
        ("units = 5", "expected NAME = value"),
        ("UNITS = EPOCHS = 5", "expected NAME = value"),
        ("import os", "expected NAME = value"),
        ("UNITS = 0", "UNITS = 0: expected an integer of at least 1, such as 256"),
        ("UNITS = [1]", "UNITS = [1]: expected an integer, such as 256"),
        ("UNITS = True", "UNITS = True: expected an integer, such as 256"),
        ("PRECISION = 'int8'", "PRECISION = 'int8': expected one of fp32, tf32, fp16"),
        ("CONFIGS = 5", "CONFIGS: expected a dict of dicts"),
        ("CONFIGS = {1: {}}", "CONFIGS: expected a dict of dicts"),
        ("PRESETS = {'quick': 5}", "PRESETS: expected a dict of dicts"),
        ("ANYTHING = None", "ANYTHING = None: its type is not known"),
        ("UNITS = (", "not valid Python"),
        ("SEEDS = 128", "nothing reads SEEDS; did you mean SEED?"),
        ("AFTERTHOUGHT = 128", "nothing reads AFTERTHOUGHT."),
        ("DROPOUT = 0.5", "nothing reads DROPOUT."),
        ("UNITS = SEED * 2", "UNITS: expected a plain value"),
    ],
)
def test_bad_header_is_refused_with_path_and_line(tmp_path, line, expected):
    path = write_script(tmp_path, f"SEED = 1\n{line}\n")
    assert refusal(opt.read_header, path).startswith(f"{path}:7: {expected}")


def test_constant_set_twice_is_refused(tmp_path):
    path = write_script(tmp_path, "UNITS = 1\nUNITS = 2\n")
    assert refusal(opt.read_header, path) == f"{path}:7: UNITS is set already in line 6; keep one"


@pytest.mark.parametrize("table", ["CONFIGS", "PRESETS"])
@pytest.mark.parametrize(
    "entry, expected",
    [
        ("dict(UNITZ=1)", "UNITZ is no constant of the header; did you mean UNITS?"),
        ("{'CONFIGS': {}}", "CONFIGS is no constant of the header"),
        ("dict(UNITS=0)", "UNITS = 0: expected an integer of at least 1, such as 256"),
    ],
)
def test_bad_entry_of_a_table_is_refused_by_name(tmp_path, table, entry, expected):
    path = write_script(tmp_path, f"UNITS = None\n{table} = {{'quick': {entry}}}\n")
    assert refusal(opt.read_header, path).startswith(f"{path}:7: {table}['quick']: {expected}")


def test_script_without_rules_is_refused(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"{RULE}\nUNITS = 5\n")
    assert "found 1 such lines" in refusal(opt.read_header, path)


def test_unreadable_scripts_are_refused(tmp_path):
    assert "cannot be read" in refusal(opt.read_header, tmp_path / "none.py")
    (tmp_path / "latin.py").write_bytes(b"# one\n# two\nUNITS = 'caf\xe9'\n")
    assert "not valid Python" in refusal(opt.read_header, tmp_path / "latin.py")


# command lines


@pytest.mark.parametrize(
    "argv, name, value",
    [
        (["--time-steps=5"], "TIME_STEPS", 5),
        (["--TIME_STEPS", "5"], "TIME_STEPS", 5),
        (["--Time-Steps", "1_000"], "TIME_STEPS", 1000),
        (["--units=1", "--UNITS=2"], "UNITS", 2),
        (["--clip-norm=5"], "CLIP_NORM", 5.0),
        (["--clip-norm=1e-3"], "CLIP_NORM", 0.001),
        (["--keep-prob=1"], "KEEP_PROB", 1.0),
        (["--dropout-1=0"], "DROPOUT_1", 0.0),
        (["--staged-batches=8"], "STAGED_BATCHES", 8),
        (["--seed", "0"], "SEED", 0),
        (["--seed=4294967295"], "SEED", 2**32 - 1),
        (["--precision=fp16"], "PRECISION", "fp16"),
        (["--config", "small"], "CONFIG", "small"),
        (["--rows=a,b=c"], "ROWS", "a,b=c"),
        (["--count=-7"], "COUNT", -7),
        (["--count", "-7"], "COUNT", -7),
        *((["--bidirectional", text], "BIDIRECTIONAL", True) for text in ("true", "True", "1", "yes")),
        *((["--bidirectional", text], "BIDIRECTIONAL", False) for text in ("false", "FALSE", "0", "no")),
    ],
)
def test_constant_is_an_option_of_its_type(header, argv, name, value):
    values = opt.parse(header, argv).values
    assert values == {name: value}
    assert type(values[name]) is type(value)


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("--units=abc", "--units=abc: expected an integer, such as 256"),
        ("--UNITS=0", "--units=0: expected an integer of at least 1, such as 256"),
        ("--units=1e3", "--units=1e3: expected an integer, such as 256"),
        ("--units=2.0", "--units=2.0: expected an integer, such as 256"),
        ("--units=", "--units=: expected an integer, such as 256"),
        ("--units=2147483648", "--units=2147483648: expected an integer of at least 1 and at most 2147483647, such"),
        ("--seed=4294967296", "--seed=4294967296: expected an integer of at least 0 and at most 4294967295, such as 1"),
        ("--units=" + "9" * 5000, "--units=" + "9" * 57 + "...: expected at most 1000 characters"),
        ("--units=1\n2", "--units=1\\n2: expected an integer, such as 256"),
        ("--staged-batches=7", "--staged-batches=7: expected an integer of at least 8, such as 8"),
        ("--clip-norm=x", "--clip-norm=x: expected a number, such as 5"),
        ("--clip-norm=0", "--clip-norm=0: expected a number above 0, such as 5"),
        ("--clip-norm=nan", "--clip-norm=nan: expected a finite number above 0, such as 5"),
        ("--clip-norm=-inf", "--clip-norm=-inf: expected a finite number above 0, such as 5"),
        ("--clip-norm=1e999", "--clip-norm=1e999: expected a finite number above 0, such as 5"),
        ("--keep-prob=0", "--keep-prob=0: expected a number above 0 and at most 1, such as 0.5"),
        ("--keep-prob=1.1", "--keep-prob=1.1: expected a number above 0 and at most 1, such as 0.5"),
        ("--dropout-1=1", "--dropout-1=1: expected a number of at least 0 and below 1, such as 0.2"),
        ("--bidirectional=2", "--bidirectional=2: expected true or false"),
        ("--precision=int8", "--precision=int8: expected one of fp32, tf32, fp16"),
        ("--config=huge", "--config=huge: expected one of small, large"),
        ("--device=tpu", "--device=tpu: expected one of gpu, cpu"),
        ("--out=a\0b", "--out=a\\x00b: expected printable characters only"),
        ("--out=", "--out=: expected a text, such as results/mine"),
        ("--unitz=4", "--unitz: no such option; did you mean --units? See --help"),
        ("--Time-Step", "--Time-Step: no such option; did you mean --time-steps? See --help"),
        ("--resum", "--resum: no such option; did you mean --resume? See --help"),
        ("--precision=fp23", "--precision=fp23: expected one of fp32, tf32, fp16, bf16; did you mean fp32?"),
        ("--zzzz", "--zzzz: no such option. See --help"),
        ("--train", "--train: no such option. See --help"),
        ("--after=1", "--after: no such option. See --help"),
        ("--units", "--units: a value is missing; expected an integer of at least 1, such as 256"),
        ("--list=1", "--list=1: --list takes no value; write --list alone"),
        ("--", "--: expected options only, each as --name=value. See --help"),
        ("-u=5", "-u=5: expected options only, each as --name=value. See --help"),
        ("keras", "keras: expected options only, each as --name=value. See --help"),
        ("", "'': expected options only, each as --name=value. See --help"),
    ],
)
def test_bad_option_is_refused_with_what_was_expected(header, argument, expected):
    assert refusal(opt.parse, header, [argument]).startswith(expected)


def test_option_followed_by_an_option_lacks_its_value(header):
    assert "--units: a value is missing" in refusal(opt.parse, header, ["--units", "--quick"])


@pytest.mark.parametrize("name", ["CONFIGS", "PRESETS", "SIZES"])
def test_tables_are_edited_in_the_header_only(header, name):
    message = refusal(opt.parse, header, [f"--{name.lower()}=5"])
    assert message.endswith(f"edit {name} in {header.path}")


def test_settings_and_flags_are_known_to_every_script(header):
    options = opt.parse(header, ["--out=a", "--data", "b", "--device=cpu", "--resume", "--list", "-h", "--quick"])
    assert (options.out, options.data, options.device, options.preset) == ("a", "b", "cpu", "quick")
    assert options.flags == {"resume", "list", "help", "quick"}
    assert options.values == {}


def test_nothing_given_leaves_the_choice_to_the_machine(header):
    options = opt.parse(header, [])
    assert options == opt.Options()
    assert options.preset is None


def test_both_presets_are_refused(header):
    assert "--quick and --full" in refusal(opt.parse, header, ["--quick", "--full"])


def test_script_declares_its_own_flags(header):
    assert opt.parse(header, ["--train"], flags={"train": "run the whole schedule"}).flags == {"train"}


def test_constant_named_like_an_option_is_refused(tmp_path):
    header = opt.read_header(write_script(tmp_path, "TRAIN = 1\n"))
    assert ":6: TRAIN: --train is an option already" in refusal(opt.parse, header, [], {"train": "train"})


argument_names = st.sampled_from(
    ["--units", "--ROWS", "--config", "--clip-norm", "--bidirectional", "--out", "--quick"]
)
argument_text = st.text(st.characters(), max_size=30)
arguments = st.one_of(
    argument_text,
    argument_names,
    st.builds("--{}".format, argument_text),
    st.builds("{}={}".format, argument_names, argument_text),
    st.builds("{}={}".format, argument_names, st.one_of(st.integers(), st.floats())),
)


@given(st.lists(arguments, max_size=6))
@settings(deadline=None)
def test_any_command_line_gives_options_or_a_user_error(header, argv):
    try:
        options = opt.parse(header, argv)
    except UserError as error:
        assert str(error).encode().decode().isprintable()
    else:
        assert opt.resolve(header, options, options.preset).keys() == header.constants.keys()


@given(st.one_of(argument_text, st.text("UNITS=0123456789.-/*'\"{}[](),# ", max_size=30)))
@settings(max_examples=200, deadline=None)
def test_any_edited_value_gives_a_header_or_a_user_error(text):
    with tempfile.TemporaryDirectory() as folder:
        path = write_script(folder, f"UNITS = {text.encode(errors='replace').decode()}\n")
        try:
            header = opt.read_header(path)
        except UserError as error:
            assert str(path) in str(error)
        else:
            assert header.constants["UNITS"].default is None or header.constants["UNITS"].default >= 1


# precedence


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], {"CONFIG": "large", "UNITS": 1500, "TIME_STEPS": 35, "EPOCHS": None}),
        (["--config=small"], {"CONFIG": "small", "UNITS": 200, "TIME_STEPS": 20, "LR_DECAY": None}),
        (["--quick"], {"UNITS": 1500, "TIME_STEPS": 10, "EPOCHS": 1}),
        (["--full"], {"TIME_STEPS": 35, "EPOCHS": 3}),
        (["--quick", "--time-steps=7", "--units=64"], {"UNITS": 64, "TIME_STEPS": 7, "EPOCHS": 1}),
    ],
)
def test_command_line_goes_before_preset_before_config(header, argv, expected):
    constants = resolved(header, *argv)
    assert {name: constants[name] for name in expected} == expected
    assert list(constants) == list(header.constants)


def test_edited_header_goes_before_preset_and_config(tmp_path):
    body = BODY.replace("TIME_STEPS = None", "TIME_STEPS = 99").replace("EPOCHS = None", "EPOCHS = 77")
    header = opt.read_header(write_script(tmp_path, body))
    assert resolved(header, "--quick")["TIME_STEPS"] == 99
    assert resolved(header, "--quick")["EPOCHS"] == 77
    assert resolved(header, "--quick", "--epochs=5")["EPOCHS"] == 5


def test_preset_may_choose_the_config(tmp_path):
    body = BODY.replace('CONFIG = "large"', "CONFIG = None").replace('{"EPOCHS": 3}', '{"CONFIG": "small"}')
    header = opt.read_header(write_script(tmp_path, body))
    assert resolved(header, "--full")["UNITS"] == 200
    assert resolved(header, "--full", "--config=large")["UNITS"] == 1500
    assert "--config: no config is set; expected one of small, large" in refusal(resolved, header)


def test_zero_and_false_count_as_written(header):
    constants = resolved(header, "--dropout-1=0", "--bidirectional=no")
    assert (constants["DROPOUT_1"], constants["BIDIRECTIONAL"]) == (0.0, False)


def test_departures_are_the_values_that_the_protocol_does_not_have(header):
    protocol = {"UNITS": 1500, "CLIP_NORM": 10, "TIME_STEPS": 35}
    assert opt.departs_from_protocol(resolved(header, "--clip-norm=10"), protocol) == []
    assert opt.departs_from_protocol(resolved(header, "--quick", "--units=1"), protocol) == ["UNITS", "TIME_STEPS"]
    assert opt.departs_from_protocol({"UNITS": 1500}, {"UNITS": 1500, "DECAY": 0.1}) == ["DECAY"]


def test_echo_names_what_the_user_changed_and_what_it_was(header, tmp_path):
    assert opt.echo(resolved(header, "--quick"), header, "quick") == ""
    argv = ["--quick", "--config=small", "--units=64", "--time-steps=7", "--rows=keras"]
    assert opt.echo(resolved(header, *argv), header, "quick") == (
        "overriding CONFIG = 'small' (was 'large'), UNITS = 64 (was 200), TIME_STEPS = 7 (was 10), "
        "ROWS = 'keras' (was 'all')"
    )
    edited = opt.read_header(write_script(tmp_path, BODY.replace("UNITS = None", "UNITS = 64")))
    assert opt.echo(resolved(edited), edited) == "overriding UNITS = 64 (was 1500)"


# rows and help


@pytest.mark.parametrize(
    "option, expected",
    [
        ("all", ["keras", "keras_cudnn", "wavefront"]),
        ("wavefront,keras", ["keras", "wavefront"]),
        (" keras , keras,", ["keras"]),
        ("keras,all", ["keras", "keras_cudnn", "wavefront"]),
    ],
)
def test_rows_come_once_each_in_the_order_of_the_script(option, expected):
    assert opt.rows(option, ["keras", "keras_cudnn", "wavefront"]) == expected


@pytest.mark.parametrize(
    "option, expected",
    [
        ("kears", "--rows=kears: no such row; did you mean keras? Known: keras, keras_cudnn"),
        ("all,zz", "--rows=zz: no such row. Known: keras, keras_cudnn"),
        (" ,", "--rows= ,: expected all or names, comma-separated, of keras, keras_cudnn"),
    ],
)
def test_unknown_rows_are_refused_with_the_known_ones(option, expected):
    assert refusal(opt.rows, option, ["keras", "keras_cudnn"]) == expected


def test_help_has_every_option_with_default_and_comment(header):
    text = opt.help_text(header, "Words per second.\n\n    python ptb.py", {"train": "run the whole schedule"})
    assert text.startswith("Words per second.\n\nusage: python ")
    assert "/ptb.py [--NAME=value ...]\n" in text
    lines = {line.split()[0].partition("=")[0]: line for line in text.splitlines() if line.startswith("  -")}
    names = [name for name in header.constants if name not in ("CONFIGS", "PRESETS", "SIZES")]
    assert lines.keys() == {
        f"--{name.lower().replace('_', '-')}" for name in [*names, *opt.FLAGS, *opt.SETTINGS, "train"]
    }
    assert lines["--units"].split(maxsplit=2) == ["--units=N", "None", "LSTM units per layer; None: the config's"]
    assert lines["--train"].split(maxsplit=1) == ["--train", "run the whole schedule"]
    assert "a number above 0, such as 5" in lines["--clip-norm"]


@pytest.mark.parametrize("docstring", [None, "", "word " * 50])
def test_help_fits_100_columns(tmp_path, docstring):
    body = (
        "UNITS = 5  # " + "long comment " * 30 + "\nROWS = '" + "keras," * 20 + "'\nVALIDATION_BATCH_SIZE_OF_ALL = 3\n"
    )
    text = opt.help_text(opt.read_header(write_script(tmp_path, body)), docstring)
    assert max(map(len, text.splitlines())) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())


# the module and the scripts


@pytest.mark.parametrize("name, limit", opt.LIMITS.items())
def test_example_and_choices_of_a_limit_are_within_it(name, limit):
    examples = limit.choices or ("true",) if limit.example is None else (str(limit.example),)
    assert [str(limit.read(text)).lower() for text in examples] == [str(limit.type(text)).lower() for text in examples]


def test_importing_needs_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import harness.run.options; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.partition(".")[0] for name in loaded.split()} <= sys.stdlib_module_names | {"harness"}


def test_every_limit_is_one_of_a_constant():
    """A constant without one may be whatever its default is of: a new one needs no second file."""
    names = {name for script in SCRIPTS for name in opt.read_header(script).constants}
    assert {id(opt.known_limit(name)) for name in names} >= {id(limit) for limit in opt.LIMITS.values()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_benchmark_ships_none_where_a_preset_or_config_governs(script):
    header = opt.read_header(script)
    governed = {name for table in (header.configs, header.presets) for entry in table.values() for name in entry}
    assert [name for name in governed if header.constants[name].default is not None] == []


def test_constant_that_a_script_asks_for_and_its_header_lacks_is_one_line(tmp_path):
    path = write_script(tmp_path, BODY.replace("STAGED_BATCHES = 8\n", ""))
    constants = opt.resolve(opt.read_header(path), opt.Options(), "full")
    with pytest.raises(UserError) as error:
        constants["STAGED_BATCHES"]
    assert str(error.value) == f"{path}: the header lacks STAGED_BATCHES; restore it"
