"""Whether TensorFlow's bf16 products live on this CPU: some virtual machines announce AMX without letting a process use it.

There the first bf16 product ends the process with SIGILL (seen with TensorFlow 2.21 on a Xeon that announces amx_bf16). What
instructions oneDNN may use is set by an environment variable before TensorFlow is imported, so a process of its own finds out.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.record import machine

VARIABLE = "ONEDNN_MAX_CPU_ISA"
OWN_CHOICE = (VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads both; what the user set is left alone
BELOW_AMX = ("AVX512_CORE_BF16", "AVX512_CORE")  # values of the variable, the one with the most instructions first
CPUINFO = Path("/proc/cpuinfo")
SETTLED = "LSTM_BENCH_BF16_SETTLED"  # in the environment: a process that started this one has found out
PRODUCT = """
import tensorflow as tf

a = tf.ones([256, 256], tf.bfloat16)
assert float(tf.matmul(a, a)[0, 0]) == 256
"""


def settle() -> str:
    """Have bf16 products live in every process that is started from here on: sets VARIABLE where it has to be set.

    To be called before TensorFlow is imported. On a CPU that does not announce AMX it costs nothing, on others about 5 s, once
    per command.

    Returns:
        What was found wrong and what is done about it, in one line; "" where nothing is wrong.
    """
    if any(name in os.environ for name in (SETTLED, *OWN_CHOICE)) or not _announces_amx():
        return ""
    os.environ[SETTLED] = "1"
    if not _dies({}):
        return ""
    what = "this CPU announces AMX, but TensorFlow's bf16 products end the process (SIGILL)"
    for value in BELOW_AMX:
        if not _dies({VARIABLE: value}):
            os.environ[VARIABLE] = machine.VARIABLES[VARIABLE] = value
            return f"{what}; going on with {VARIABLE}={value}"
    return f"{what}, with {VARIABLE}={value} too: rows and tests in bf16 will crash"


def _announces_amx() -> bool:
    try:
        return "amx_bf16" in CPUINFO.read_text().split()
    except OSError:  # not Linux
        return False


def _dies(variables: dict[str, str]) -> bool:
    """Whether a process that computes one bf16 product is ended by an illegal instruction.

    Any other failure, such as a TensorFlow that is not installed or a machine out of memory, says nothing about the CPU: what
    needs it tells it better.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, "-c", PRODUCT]
    status = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True).returncode
    return status == -signal.SIGILL
