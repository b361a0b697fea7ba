"""Where the data are looked for: what the user wrote, then the environment, then everywhere."""

import pytest

from harness.data.location import ENVIRONMENT, locate
from harness.errors import UserError


def test_option_comes_before_the_environment_and_the_environment_before_the_search(tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert locate(None) == (tmp_path, "", "LSTM_BENCH_DATA")
    assert locate("embedded") == (None, "asked for by --data=embedded", "--data")
    (tmp_path / "other").mkdir()
    assert locate(str(tmp_path / "other")) == (tmp_path / "other", "", "--data")
    monkeypatch.setenv(ENVIRONMENT, "embedded")
    assert locate(None) == (None, "asked for by LSTM_BENCH_DATA=embedded", "LSTM_BENCH_DATA")
    monkeypatch.setenv(ENVIRONMENT, "")
    assert locate(None)[:2] == (None, "")


@pytest.mark.parametrize("option", ["", "no/such/folder", __file__, "a\0b"])
def test_data_folder_that_does_not_exist_is_a_user_error(option):
    with pytest.raises(UserError) as caught:
        locate(option)
    assert str(caught.value).startswith(f"--data={option}: no such folder; expected one that holds mnist/ and ptb/")
