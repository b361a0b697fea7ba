"""Rows in which one of two replicas does what it should not: an import adds them to models/rows.py's REPLICATED."""

import dataclasses
import importlib

from models import rows


def build(*arguments, plant, factory, **options):
    """The row's model, with a mistake planted."""
    return MISTAKES[plant](
        importlib.import_module(factory.rpartition(".")[0]), rows.imported(factory), arguments, options
    )


def same_data(module, make, arguments, options):
    """Every replica trains on the first one's part of the data."""
    name = "part_of" if hasattr(module, "part_of") else "parts_of"
    part = getattr(module, name)
    setattr(module, name, lambda whole, rank, size: part(whole, 0, size))
    return make(*arguments, **options)


def gradient_left_out(module, make, arguments, options):
    """The second replica's gradient does not count."""
    model = make(*arguments, **options)
    if options["group"].rank:
        added_up = model._added_up
        model._added_up = lambda own: added_up([0.0 * tensor for tensor in own] if isinstance(own, list) else 0.0 * own)
    return model


def no_all_reduce(module, make, arguments, options):
    """Each replica trains by its own gradient."""
    model = make(*arguments, **options)
    model._added_up = lambda own: own if isinstance(own, list) else own * float(options["replicas"])
    return model


def last_bit(module, make, arguments, options):
    """A weight of the second replica is another by its last bit after every step: no error is as small."""
    model = make(*arguments, **options)
    train = model.train

    def nudged(batch):
        loss = train(batch)
        if options["group"].rank:
            model.masters[0].data[0, 0] *= 1 + 2**-22
        return loss

    model.train = nudged
    return model


MISTAKES = {made.__name__: made for made in (same_data, gradient_left_out, no_all_reduce, last_bit)}
rows.REPLICATED |= {
    f"{row}_{plant}": dataclasses.replace(
        rows.REPLICATED[row],
        factory="tests.harness.planted_replicas.build",
        arguments={**rows.REPLICATED[row].arguments, "plant": plant, "factory": rows.REPLICATED[row].factory},
    )
    for row in ("torch_bucket", "wavefront_workers")
    for plant in MISTAKES
}
