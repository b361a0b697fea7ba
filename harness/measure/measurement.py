"""What `run_row` of a benchmark is given. Knows no particular LSTM."""

from harness.measure.fit import FitMeasurement
from harness.measure.requests import RequestMeasurement
from harness.measure.training import TrainingMeasurement


class Measurement(TrainingMeasurement, FitMeasurement, RequestMeasurement):
    """One row's process with the ways to prove and time a row, of which the script calls one: steps, training, fit or requests.

    An option of a Keras layer, and replicas that train together, have a class of their own (options.py, replicas.py).
    """
