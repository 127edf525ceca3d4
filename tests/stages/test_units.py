import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compression.errors import PlanError
from penstock.stages.units import parse_bytes, parse_rate, show_bytes, show_count, show_rate, show_seconds


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("64KiB", 65_536),
        ("1.5MB", 1_500_000),
        ("1.5 MiB", 1_572_864),
        ("3kB", 3_000),
        ("4TB", 4 * 10**12),
        ("100B", 100),
        ("1000", 1_000),
        (1_000, 1_000),
        (1e9, 10**9),
    ],
)
def test_sizes(written, num_bytes):
    assert parse_bytes(written) == num_bytes
    assert type(parse_bytes(written)) is int


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ("1Gbit", 1e9),
        ("100Mbit", 1e8),
        ("2.5Gbit", 2.5e9),
        ("56kbit", 56e3),
        ("9600bit", 9600.0),
        (1e8, 1e8),
        (5, 5.0),
    ],
)
def test_rates(written, rate):
    assert parse_rate(written) == rate
    assert type(parse_rate(written)) is float


BAD = [
    "",
    "GiB",
    "2 GB GB",
    "2gib",
    "-1GiB",
    "1e9GiB",
    "2,5GB",
    "٣GiB",
    "nan",
    "inf",
    "0",
    0,
    -1,
    True,
    1e400,
    float("nan"),
    None,
    [],
]


@pytest.mark.parametrize("value", [*BAD, "1Gbit", "0.2B", 0.5])
def test_what_is_no_size_is_refused_by_name_and_value(value):
    with pytest.raises(
        PlanError, match=r"^memory.disk=.* is not a size in bytes; write it like 2GiB"
    ) as error:
        parse_bytes(value, name="memory.disk")
    assert f"memory.disk={value} " in str(error.value)


@pytest.mark.parametrize("value", [*BAD, "1GB", "1Gbits", "fast"])
def test_what_is_no_rate_is_refused_by_name_and_value(value):
    with pytest.raises(
        PlanError, match=r"^link=.* is not a rate in bits per second; write it like 1Gbit"
    ) as error:
        parse_rate(value)
    assert f"link={value} " in str(error.value)


@settings(deadline=None, derandomize=True)
@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.booleans()))
def test_any_value_is_read_or_refused(value):
    for parse in (parse_bytes, parse_rate):
        try:
            assert parse(value) > 0
        except PlanError:
            pass


def test_amounts_read_well():
    assert [show_bytes(n) for n in (0, 1, 1023, 1024, 1536, 2 * 1024**3, 1024**5)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1.5 KiB", "2 GiB", "1024 TiB",
    ]  # fmt: skip
    assert [show_rate(n) for n in (1e9, 2.5e6, 999)] == ["1 Gbit/s", "2.5 Mbit/s", "999 bit/s"]
    assert [show_seconds(n) for n in (0, 12e-6, 0.0123, 0.5, 61)] == [
        "0 us",
        "12 us",
        "12.3 ms",
        "500 ms",
        "61 s",
    ]
    assert [show_count(n) for n in (7, 11_181_642, 999_960)] == ["7", "11.2 M", "1 M"]
