"""What the language models of all frameworks share."""

from types import SimpleNamespace

import pytest

from models import trial


def test_dropout_comes_back_even_where_a_step_fails():
    set_to = []
    model = SimpleNamespace(dropout_rate=0.35, set_dropout_rate=set_to.append)
    with pytest.raises(RuntimeError), trial.dropout_off(model):
        raise RuntimeError
    assert set_to == [0.0, 0.35]


def test_mean_loss_weighs_each_batch_by_its_steps():
    assert trial.mean_loss([2.0, 5.0], [30, 10], "mean") == (2 * 30 + 5 * 10) / 40
    assert trial.mean_loss([60.0, 50.0], [30, 10], "sum_over_time") == (60 + 50) / 40


def test_rates_of_a_stack_stand_between_its_layers_and_after_it():
    assert trial.rates_of_stack((0.2, 0.1), 2) == (0.2, 0.1)
    assert trial.rates_of_stack((0.2, 0.2, 0.1), 3) == (0.2, 0.1)
    assert trial.rates_of_stack((0.2,), 2) == (0.2, 0.0) and trial.rates_of_stack((), 2) == (0.0, 0.0)
    assert trial.rates_of_stack((0.2, 0.1), 1) == (0.0, 0.2)
