"""Options that are not applied, and options that raise: an import adds them to models/keras/options.py's OPTIONS."""

import os
from collections.abc import Mapping

from models.keras.options import OPTIONS, RATE, Option


class NotHandedOver(Mapping):
    """Arguments that a layer never gets, though the option names them."""

    def __init__(self, **arguments):
        self._arguments = arguments

    def __getitem__(self, name):
        return self._arguments[name]

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Ends(Mapping):
    """Arguments at which the process ends, as by a crash in a library."""

    def __getitem__(self, name):
        raise KeyError(name)

    def __iter__(self):
        os._exit(9)

    def __len__(self):
        return 1


OPTIONS |= {
    "not_relu": Option("", layer=NotHandedOver(activation="relu"), mathematics={"activation": "relu"}),
    "not_unrolled": Option("", layer=NotHandedOver(unroll=True)),
    "not_dropped": Option("", layer=NotHandedOver(recurrent_dropout=RATE)),
    "not_float64": Option("", policy="float64", layer={"dtype": "float32"}),
    "raises_at_once": Option("", layer={"activation": "no_such_activation"}),
    "raises_when_called": Option("", kind="wavefront", data="left"),
    "ends": Option("", layer=Ends()),
}
