"""The surroundings of a run on its page: settings in force, loaders, the profiler's look, the machine."""

from __future__ import annotations

from collections.abc import Iterable

from fulltilt import figures
from fulltilt.records import Diagnosis, LoaderRecord, Machine, RankRecord
from fulltilt.report import wording
from fulltilt.report.loaders import loader_sites
from fulltilt.report.markup import Markup, element


def definitions(name: str, pairs: Iterable[tuple[str, str | None]]) -> Markup | None:
    """Names with their values; what is not known is left out."""
    known = [(term, value) for term, value in pairs if value not in (None, "", figures.NOT_MEASURED)]
    if not known:
        return None
    items = [element("div", element("dt", term), element("dd", value)) for term, value in known]
    return element("div", element("h3", name), element("dl", items))


def settings(diagnosis: Diagnosis) -> Markup | None:
    """The settings in force."""
    return definitions("Settings", ((name, wording.setting(value)) for name, value in diagnosis.settings))


def deep_look(rank: RankRecord) -> Markup | None:
    """What the profiler saw in a step."""
    return definitions("A step under the profiler", wording.deep_facts(rank.deep)) if rank.deep else None


def loaders(rank: RankRecord) -> list[Markup]:
    """Each line that makes DataLoaders that were used, and what came out of them."""
    shown = [definitions(_loader_name(site.loader), _loader_facts(site.loader)) for site in loader_sites(rank)]
    return [markup for markup in shown if markup is not None]


def _loader_name(loader: LoaderRecord) -> str:
    return f"Loader for {'training' if loader.role == 'train' else 'evaluation'}"


def _loader_facts(loader: LoaderRecord) -> list[tuple[str, str | None]]:
    return [
        ("made at", loader.where),
        ("data set", loader.dataset),
        ("samples in it", None if loader.dataset_len is None else figures.whole(loader.dataset_len)),
        ("workers", str(loader.num_workers)),
        ("batches", figures.whole(loader.batches)),
        ("batch", figures.size(loader.batch_bytes)),
        ("start method", loader.start_method),
        ("waited for it", figures.seconds(loader.wait_s)),
        ("worker restarts", figures.seconds(loader.restart_s)),
    ]


def machine(machine: Machine) -> Markup | None:
    """The machine that the run took place on."""
    cpu = machine.cpu
    return definitions(
        "Machine",
        [
            ("host", machine.hostname),
            ("system", machine.platform),
            ("CPUs", f"{cpu.usable:g} usable of {cpu.present}"),
            ("memory", figures.size(machine.mem_limit_bytes or machine.mem_total_bytes)),
            ("/dev/shm", figures.size(machine.shm_total_bytes)),
            ("GPU", ", ".join(gpu.name for gpu in machine.gpus) or machine.why_no_gpu),
            ("driver", machine.driver),
            ("Python", machine.python),
            ("torch", machine.torch),
            ("CUDA", machine.cuda),
        ],
    )
