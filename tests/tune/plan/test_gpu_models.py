import pytest

from fulltilt.tune.plan.gpu_models import GPU_MODELS, find_gpu

GB = 1 << 30


def test_the_table_covers_the_guides_and_todays_gpus() -> None:
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
