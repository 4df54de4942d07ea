import pytest

from fulltilt.tuning.gpu_models import GPU_MODELS, find_gpu

GB = 1 << 30


def test_the_table_covers_common_and_data_centre_gpus() -> None:
    assert len(GPU_MODELS) >= 30
    assert len({model.name for model in GPU_MODELS}) == len(GPU_MODELS)
    for name in ("RTX 3070", "RTX 4060", "RTX 3090", "RTX 4080", "RTX 4090", "RTX 5090", "Tesla T4", "P100", "B200"):
        assert find_gpu(name) is not None


@pytest.mark.parametrize(
    ("driver_name", "memory_gb", "expected"),
    [
        ("NVIDIA GeForce RTX 3070", 8, "RTX 3070"),
        ("NVIDIA GeForce RTX 3070 Ti", 8, "RTX 3070 Ti"),
        ("RTX 3080Ti", None, "RTX 3080 Ti"),
        ("rtx3090", None, "RTX 3090"),
        ("4090", None, "RTX 4090"),
        ("A6000", None, "RTX A6000"),
        ("Quadro RTX 6000", 24, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, None),
        ("Tesla T4", 15, "Tesla T4"),
        ("Tesla P100-PCIE-16GB", 16, "Tesla P100"),
        ("Tesla V100-SXM2-32GB", 32, "Tesla V100 32GB"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100 40GB"),
        ("A100 80GB", None, "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", 80, "H100"),
        ("NVIDIA H100 PCIe", 80, "H100 PCIe"),
        ("NVIDIA H200", 141, "H200"),
        ("NVIDIA A10G", 24, "A10G"),
        ("NVIDIA A10", 24, "A10"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", 8, None),
        # Another chip under the same number: its figures are its own, or not known.
        ("NVIDIA GeForce RTX 4070 SUPER", 12, "RTX 4070 SUPER"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16, "RTX 4080 SUPER"),
        ("NVIDIA H200 NVL", 140, "H200 NVL"),
        ("NVIDIA GeForce RTX 2060 SUPER", 8, None),
        ("NVIDIA GeForce RTX 4090 D", 24, None),
        ("NVIDIA GeForce RTX 5060 Ti", 16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40, None),
        ("AMD Instinct MI300X", 192, None),
    ],
)
def test_names_as_drivers_write_them(driver_name: str, memory_gb: int | None, expected: str | None) -> None:
    found = find_gpu(driver_name, None if memory_gb is None else memory_gb * GB)
    assert (None if found is None else found.name) == expected


def test_a_gpu_without_bfloat16_computes_in_float16() -> None:
    turing = find_gpu("Tesla T4")
    pascal = find_gpu("GTX 1080 Ti")
    assert turing is not None
    assert pascal is not None
    assert turing.rate("bf16") == (65, "fp16")
    assert pascal.rate("bf16") == (11.3, "fp32")


@pytest.mark.parametrize(("name", "driver_mib"), [("T4", 15360), ("A10G", 23028), ("L4", 23034), ("L40S", 46068)])
def test_error_correction_takes_its_part_of_a_servers_memory(name: str, driver_mib: int) -> None:
    """As nvidia-smi shows them: what the data sheet adds is no room for a batch."""
    found = find_gpu(name)
    assert found is not None
    assert found.memory_bytes == pytest.approx(driver_mib << 20, rel=0.01)
