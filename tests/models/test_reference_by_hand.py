"""The float64 reference, compared with numbers worked by hand.

One unit, two steps, x = (1, 2), h_0 = 1/3, c_0 = ln 3 - 3/4. With sigmoid(ln k) = k/(k+1) and
tanh(ln(k)/2) = (k-1)/(k+1), the weights (gates i, f, c, o)
    W = ( ln 3,  -ln 3,   ln(7/3)/2,  ln 2)
    R = (3 ln 3, -3 ln 3, 3 ln(3)/2,  3 ln 2)
    b = (-ln 3,  2 ln 3, -ln(7/3)/2, -ln 2)
give, since R/3 = (ln 3, -ln 3, ln(3)/2, ln 2),
    z_1 = W + R/3 + b  = (ln 3, 0, ln(3)/2, ln 2)        i, f, g, o = 3/4, 1/2, 1/2, 2/3
    c_1 = (ln 3 - 3/4)/2 + 3/4 * 1/2 = ln(3)/2           tanh c_1 = 1/2,  h_1 = 2/3 * 1/2 = 1/3
    z_2 = 2W + R/3 + b = (ln 9, -ln 3, ln(7)/2, ln 4)    i, f, g, o = 9/10, 1/4, 3/4, 4/5
    c_2 = ln(3)/2 / 4 + 9/10 * 3/4 = ln(3)/8 + 27/40 = 0.8123265    h_2 = 4/5 tanh c_2 = 0.5366974
The derivatives of h_2, with T = tanh c_2 and D = dh_2/dc_2 = 4/5 (1 - T²):
    dz_2 = (D * 3/4 * 9/100,  D * ln(3)/2 * 3/16,  D * 9/10 * 7/16,  T * 4/25)
    dh_1 = R dz_2,   dc_1 = D/4 + dh_1 * 2/3 * 3/4
    dz_1 = (dc_1 * 1/2 * 3/16,  dc_1 * c_0 * 1/4,  dc_1 * 3/4 * 3/4,  dh_1 * 1/2 * 2/9)
    dW = dz_1 + 2 dz_2,  dR = (dz_1 + dz_2)/3,  db = dz_1 + dz_2
    dx = (W dz_1, W dz_2),  dh_0 = R dz_1,  dc_0 = dc_1/2
"""

from math import exp, log, tanh

import numpy as np

from models.reference.lstm import lstm_stack_backward, lstm_stack_forward

LN2, LN3 = log(2), log(3)
HAND = {
    "lstm_0/forward/kernel": np.array([[LN3, -LN3, log(7 / 3) / 2, LN2]]),
    "lstm_0/forward/recurrent_kernel": np.array([[3 * LN3, -3 * LN3, 1.5 * LN3, 3 * LN2]]),
    "lstm_0/forward/bias": np.array([-LN3, 2 * LN3, -log(7 / 3) / 2, -LN2]),
}
HAND_STATES = [[(np.array([[1 / 3]]), np.array([[LN3 - 3 / 4]]))]]
HAND_INPUTS = np.array([[[1.0], [2.0]]])


def test_two_steps_of_one_unit_match_the_numbers_worked_by_hand():
    outputs, final_states, cache = lstm_stack_forward(HAND_INPUTS, HAND, HAND_STATES, num_layers=1)
    gates = [[3 / 4, 1 / 2, 1 / 2, 2 / 3], [9 / 10, 1 / 4, 3 / 4, 4 / 5]]
    np.testing.assert_allclose(cache[0][0].gates[:, 0], gates, rtol=1e-15, atol=0)
    np.testing.assert_allclose(outputs.ravel(), [1 / 3, 0.5366974], atol=5e-8)
    np.testing.assert_allclose(outputs.ravel(), [1 / 3, 0.8 * tanh(LN3 / 8 + 27 / 40)], rtol=1e-15, atol=0)
    h, c = final_states[0][0]
    np.testing.assert_allclose(c, [[LN3 / 8 + 27 / 40]], rtol=1e-15, atol=0)
    np.testing.assert_array_equal(h, outputs[:, -1])


def test_gradients_of_two_steps_match_the_numbers_worked_by_hand():
    squared = exp(2 * (LN3 / 8 + 27 / 40))
    t = (squared - 1) / (squared + 1)
    d = 0.8 * (1 - t * t)
    kernel, recurrent = HAND["lstm_0/forward/kernel"][0], HAND["lstm_0/forward/recurrent_kernel"][0]
    dz_2 = np.array([d * 27 / 400, d * LN3 * 3 / 32, d * 63 / 160, t * 4 / 25])
    dh_1 = recurrent @ dz_2
    dc_1 = d / 4 + dh_1 / 2
    dz_1 = np.array([dc_1 * 3 / 32, dc_1 * (LN3 - 3 / 4) / 4, dc_1 * 9 / 16, dh_1 / 9])

    _, _, cache = lstm_stack_forward(HAND_INPUTS, HAND, HAND_STATES, num_layers=1)
    d_inputs, gradients, d_states = lstm_stack_backward(np.array([[[0.0], [1.0]]]), cache)
    expected = {
        "lstm_0/forward/kernel": [dz_1 + 2 * dz_2],
        "lstm_0/forward/recurrent_kernel": [(dz_1 + dz_2) / 3],
        "lstm_0/forward/bias": dz_1 + dz_2,
    }
    for name, array in expected.items():
        np.testing.assert_allclose(gradients[name], array, rtol=4e-15, atol=0)
    np.testing.assert_allclose(d_inputs.ravel(), [kernel @ dz_1, kernel @ dz_2], rtol=4e-15, atol=0)
    np.testing.assert_allclose(d_states[0][0], [[[recurrent @ dz_1]], [[dc_1 / 2]]], rtol=4e-15, atol=0)
