import pytest

from jremat.estimator.hardware import CHIPS, GIB, chip, chip_of

# Dense bf16 TFLOP/s of the makers' sheets, by hand.
SHEETS = {"a100": 312, "h100": 989, "h100-pcie": 756, "h200": 989, "b200": 2250, "v4": 275, "v5e": 197, "v5p": 459,
          "v6e": 918}  # fmt: skip


def test_rates_are_the_sheets():
    assert {name: int(row.bf16_flops_per_second / 1e12) for name, row in CHIPS.items()} == SHEETS


def test_rows_are_in_their_units():
    for row in CHIPS.values():
        assert 15 * GIB < row.hbm_bytes < 192 * GIB
        assert 0.5e12 < row.hbm_bytes_per_second < 10e12
        assert 10e9 < row.host_link_bytes_per_second < row.chip_link_bytes_per_second < row.hbm_bytes_per_second
        if row.tf32_flops_per_second:
            assert row.tf32_flops_per_second == pytest.approx(row.bf16_flops_per_second / 2)
        assert row.source


def test_every_device_kind_finds_its_own_row():
    assert {chip_of(row.device_kind) for row in CHIPS.values()} == set(CHIPS.values())


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A100-SXM4-40GB", "NVIDIA H200 NVL", "TPU v7", ""])
def test_another_chip_is_never_taken_for_one_of_the_table(kind):
    assert chip_of(kind) is None


def test_unknown_chip_lists_near_ones():
    with pytest.raises(ValueError, match=r"chip: 'h10' is not in the table; near: h100"):
        chip("h10")


def test_float32_runs_on_tf32_or_one_pass():
    assert chip("a100").matmul_flops_per_second("float32") == 156e12
    assert chip("v5e").matmul_flops_per_second("float32") == 197e12
    with pytest.raises(ValueError, match="dtype: expected bfloat16, float16 or float32, got 'int8'"):
        chip("a100").matmul_flops_per_second("int8")
