from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.errors import PlanError
from penstock.stages.units import parse_bytes, parse_rate, show_bytes, show_count, show_rate, show_seconds

SIZES = {"2GiB": 2 * 1024**3, "64KiB": 65_536, "1.5MB": 1_500_000, "1.5 MiB": 1_572_864, "3kB": 3_000}
SIZES |= {"4TB": 4 * 10**12, "100B": 100, "1000": 1_000, 1_000: 1_000, 1e9: 10**9}
RATES = {"1Gbit": 1e9, "100Mbit": 1e8, "2.5Gbit": 2.5e9, "56kbit": 56e3, "9600bit": 9600.0, 1e8: 1e8, 5: 5.0}
BAD = ["", "GiB", "2 GB GB", "2gib", "-1GiB", "1e9GiB", "2,5GB", "٣GiB", "nan", "inf", "0"]
BAD += [0, -1, True, 1e400, float("nan"), None, []]


def test_sizes_and_rates():
    cases: Any = (parse_bytes, int, SIZES), (parse_rate, float, RATES)
    for parse, kind, written in cases:
        found = {text: parse(text) for text in written}
        assert found == written
        assert {type(value) for value in found.values()} == {kind}


@pytest.mark.parametrize("value", [*BAD, "1Gbit", "0.2B", 0.5])
def test_what_is_no_size_is_refused_by_name_and_value(value):
    with pytest.raises(PlanError, match=r"^memory.disk=.* size in bytes.* 2GiB") as error:
        parse_bytes(value, name="memory.disk")
    assert f"memory.disk={value} " in str(error.value)


@pytest.mark.parametrize("value", [*BAD, "1GB", "1Gbits", "fast"])
def test_what_is_no_rate_is_refused_by_name_and_value(value):
    with pytest.raises(PlanError, match=r"^link=.* bits per second.* 1Gbit") as error:
        parse_rate(value)
    assert f"link={value} " in str(error.value)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.booleans()))
def test_any_value_is_read_or_refused(value):
    for parse in (parse_bytes, parse_rate):
        try:
            assert parse(value) > 0
        except PlanError:
            pass


def test_amounts_read_well():
    sizes = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 2 * 1024**3: "2 GiB"}
    seconds = {0: "0 us", 12e-6: "12 us", 0.0123: "12.3 ms", 0.5: "500 ms", 61: "61 s"}
    for show, written in (
        (show_bytes, {**sizes, 1024**5: "1024 TiB"}),
        (show_rate, {1e9: "1 Gbit/s", 2.5e6: "2.5 Mbit/s", 999: "999 bit/s"}),
        (show_seconds, seconds),
        (show_count, {7: "7", 11_181_642: "11.2 M", 999_960: "1 M"}),
    ):
        assert {amount: show(amount) for amount in written} == written
