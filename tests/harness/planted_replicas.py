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
    added_up = model._added_up

    def added_up_without(own, *others):
        counts = 1.0 - rank_of(module, options)
        return added_up([counts * tensor for tensor in own] if isinstance(own, list) else counts * own, *others)

    model._added_up = added_up_without
    return model


def rank_of(module, options):
    """Of the replica that calls it, of two."""
    return module.lax.axis_index(module.AXIS) if hasattr(module, "AXIS") else options["group"].rank


def no_all_reduce(module, make, arguments, options):
    """Each replica trains by its own gradient."""
    model = make(*arguments, **options)
    gives_mean = hasattr(module, "AXIS")  # else the sum
    scale = 1.0 if gives_mean else float(options["replicas"])
    model._added_up = lambda own, *_: [scale * part for part in own] if isinstance(own, list) else own * scale
    return model


def last_bit(module, make, arguments, options):
    """A weight of the second replica is another by its last bit after every step: no error is as small."""
    model = make(*arguments, **options)
    if hasattr(module, "AXIS"):
        update = model.optimizer.update

        def nudged_update(*of_step):
            [first, *others], slots = update(*of_step)
            return [first.at[0, 0].multiply(1 + 2**-22 * rank_of(module, options)), *others], slots

        model.optimizer.update = nudged_update
        return model
    train = model.train

    def nudged(batch):
        loss = train(batch)
        if options["group"].rank:
            model.masters[0].data[0, 0] *= 1 + 2**-22
        return loss

    model.train = nudged
    return model


def large_apart(module, make, arguments, options):
    """No mistake: gradients of few elements are large already."""
    module.LARGE = 100
    return make(*arguments, **options)


def first_part(module, make, arguments, options):
    """Of every batch the devices of one jax.Array have all the first replica's part."""
    import jax

    model = make(*arguments, **options)

    def as_the_first(array):
        parts = [jax.device_put(array.addressable_shards[0].data, shard.device) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    model.batches = jax.tree.map(as_the_first, model.batches)
    return model


def undivided(module, make, arguments, options):
    """Every device has the whole batch, so that there is nothing to add up: right, and of no use."""
    model = make(*arguments, **options)
    jax, whole = model._jax, model._whole
    model.batches, model.initial_states = jax.device_put((model.batches, model.initial_states), whole)
    model._jitted_train = jax.jit(model._train_step, donate_argnums=0, out_shardings=whole)
    model.restore()
    return model


OF_ALL = (same_data, gradient_left_out, no_all_reduce, last_bit)
OF_ONE_ARRAY = (first_part, undivided)
MISTAKES = {made.__name__: made for made in (*OF_ALL, *OF_ONE_ARRAY, large_apart)}
PLANTED = {
    "torch_bucket": OF_ALL,
    "wavefront_workers": (*OF_ALL, large_apart),
    "jax_sharded": OF_ALL,
    "keras_jax_parallel": OF_ONE_ARRAY,
}
rows.REPLICATED |= {
    f"{row}_{made.__name__}": dataclasses.replace(
        rows.REPLICATED[row],
        factory="tests.harness.planted_replicas.build",
        arguments={**rows.REPLICATED[row].arguments, "plant": made.__name__, "factory": rows.REPLICATED[row].factory},
    )
    for row, mistakes in PLANTED.items()
    for made in mistakes
}
