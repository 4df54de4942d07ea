"""The choice of a tier, and the room that each has."""

from __future__ import annotations

import pytest
import torch

from fulltilt.errors import DoesNotFit, UsageError
from fulltilt.feed import tiers
from fulltilt.feed.tiers import choose_tier, measure_free_bytes

GIB = 1024**3
ROOM = {"vram": 10 * GIB, "pinned": 20 * GIB, "ram": 40 * GIB, "disk": 100 * GIB}


@pytest.mark.parametrize(("need", "tier"), [(10, "vram"), (11, "pinned"), (21, "ram"), (41, "disk"), (101, "none")])
def test_the_first_tier_with_room_is_taken(need, tier):
    choice = choose_tier(need * GIB, ROOM)
    assert choice.tier == tier
    assert f"{need} GiB" in choice.reason


def test_a_tier_that_is_asked_for_is_taken_or_refused():
    assert choose_tier(GIB, ROOM, "ram").tier == "ram"
    with pytest.raises(DoesNotFit, match=r"needs 11 GiB; vram has room for 10 GiB"):
        choose_tier(11 * GIB, ROOM, "vram")
    no_gpu = {"ram": GIB}
    with pytest.raises(UsageError, match="no such memory"):
        choose_tier(GIB, no_gpu, "vram")
    assert choose_tier(2 * GIB, no_gpu).tier == "none"


def test_room_leaves_the_model_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GIB)
    cuda = torch.device("cuda", 0)
    unknown = measure_free_bytes(cuda, tmp_path)["vram"]
    settled = measure_free_bytes(cuda, tmp_path, model_has_run=True)["vram"]
    stated = measure_free_bytes(cuda, tmp_path, reserve_bytes=30 * GIB)["vram"]
    assert unknown == 20 * GIB  # half of the GPU is left for a model that nobody has seen yet
    assert settled == 60 * GIB - int(80 * GIB * 0.08)
    assert stated == 60 * GIB - int(80 * GIB * 0.08) - 18 * GIB  # 12 of the 30 are taken already


def test_memory_is_shared_by_the_ranks_of_a_machine_and_bounded_by_its_cgroup(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    alone = measure_free_bytes(cpu, tmp_path)["ram"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert measure_free_bytes(cpu, tmp_path)["ram"] == pytest.approx(alone / 4, rel=0.2)
    monkeypatch.setattr(tiers, "memory_headroom_bytes", lambda: 4 * GIB)
    assert measure_free_bytes(cpu, tmp_path)["ram"] < GIB


@pytest.mark.parametrize(("told", "gpus", "here"), [("2", 8, 2), (None, 0, 6), (None, 1, 6), (None, 4, 4)])
def test_ranks_without_a_launcher_may_all_be_on_this_machine(told, gpus, here, monkeypatch):
    monkeypatch.setattr(tiers, "ranks", lambda: (0, 6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert tiers.local_ranks() == here
