"""Makes pools for one loader and keeps them fit from pass to pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.loaders import LoaderTap, LoaderTaps
from fulltilt.tuning.live.anatomy import Anatomy, anatomy
from fulltilt.tuning.live.limits import Limits
from fulltilt.tuning.live.orders import Orders
from fulltilt.tuning.live.own_generator import own_generator
from fulltilt.tuning.live.pools import Pool, begin_as_the_script_would, make_pool
from fulltilt.tuning.live.surface import surface
from fulltilt.tuning.live.window import Knobs, Seen

DATA_SET_CHANGES = "its data set changes from pass to pass, which workers that live on miss"
PASSES_OVERLAP = "one pass over it begins while another goes on, and workers that live on would begin anew for both"


def knobs_of(loader: Any) -> Knobs:
    """The settings that the script gave its loader."""
    return Knobs(
        int(loader.num_workers),
        loader.prefetch_factor or Knobs(0).prefetch,
        bool(loader.pin_memory),
        bool(loader.persistent_workers),
    )


class Workshop:
    """Pools for the loader that a tap stands at. The script may put another loader in its place from pass to pass."""

    def __init__(self, taps: LoaderTaps, tap: LoaderTap, limits: Limits) -> None:
        self.user = Knobs(0)
        self._taps = taps
        self._tap = tap
        self._limits = limits
        self._loader: Callable[[], Any] = lambda: None
        self._first_pass = True
        self._seed = 0
        self._made = 0
        self._forked_from: Anatomy | None = None
        self._surface: tuple[Any, ...] = ()
        # Why workers must not live on from pass to pass, as far as seen.
        self.against_persistence: str | None = None

    @property
    def may_persist(self) -> bool:
        """Whether workers may live on from pass to pass."""
        return self.against_persistence is None

    @property
    def loader(self) -> Any:
        """The script's DataLoader."""
        return self._loader()

    def adopt(self, loader: Any) -> None:
        """Work for this loader from now on."""
        self._loader = weakref.ref(loader)
        self.user = knobs_of(loader)
        self._first_pass = True
        self._forked_from = None
        self.against_persistence = None

    @property
    def user_persists(self) -> bool:
        """Whether the script's own workers live on, with the data set as it was when they started."""
        return self.user.workers > 0 and self.user.persistent

    def can_begin_theirs(self) -> bool:
        """Whether torch's own iterator would begin a pass as in the plain run.

        Workers that persist are seeded once. Where the script's own have been retired, new ones of torch's would draw
        a seed that the plain run does not draw.
        """
        return not self.user_persists or self._first_pass or self.loader._iterator is not None

    def begin_theirs(self, start: Callable[[], Any]) -> Any:
        """torch's own iterator for a new pass."""
        iterator = start()
        self._seed = iterator._base_seed
        self._first_pass = False
        self._surface = self._surface_now()
        return iterator

    def begin_ours(self) -> Orders:
        """The orders of a new pass in which torch's own iterator is not made."""
        sampler, seed = begin_as_the_script_would(self.loader, self._first_pass)
        if self.loader._iterator is not None:  # the script's own workers persist, and are not asked again
            self.retire(Pool(self.loader._iterator, self.user, own=False))
        self._seed = self._seed + 1 if seed is None else seed
        self._first_pass = False
        self._surface = self._surface_now()
        return Orders(sampler, self._depth, generator=own_generator(self.loader._index_sampler))

    def orders_of(self, iterator: Any) -> Orders:
        """The orders of a pass that torch's own iterator has begun: its workers have been sent their first."""
        generator = own_generator(self.loader._index_sampler)
        return Orders(iterator._sampler_iter, self._depth, drawn=self._depth, generator=generator)

    @property
    def _depth(self) -> int:
        """How many batches the script's own loader reads ahead."""
        return self.user.workers * self.user.prefetch

    def make(self, knobs: Knobs, seen: Seen | None = None) -> Pool:
        """Start a pool. Its workers draw random numbers of their own: the next seed behind those of the script's.

        ``seen`` tells how long a batch takes, and so how long to wait for the first one.
        """
        self._made += 1
        seed = (self._seed + 0x9E3779B97F4A7C15 * self._made) % 2**63
        batch_s = max(knobs.workers, 1) / seen.batches_per_s if seen is not None else 0.0
        patience_s = max(self._limits.first_batch_s, self._limits.first_batch_times * batch_s)
        self._forked_from = self._anatomy()
        self._surface = self._surface_now()
        return make_pool(self.loader, knobs, seed, self._taps, self._tap, patience_s)

    def make_final(self) -> Pool:
        """A pool with the script's own settings, whose errors are the script's."""
        pool = self.make(self.user)
        pool.final = True
        self.trust(pool)
        return pool

    def trust(self, pool: Pool) -> None:
        """A pool has proven itself: from now on it may take as long as the script allows."""
        pool.iterator.patience_s = self.loader.timeout or None

    def renew(self, pool: Pool | None) -> Pool | None:
        """A pool of ours ready for another pass; None when there is none, or the data set has changed meanwhile.

        A worker has the data set as it was when the worker was forked. The script may have changed its own since, and
        workers that do not persist would show it.
        """
        if pool is None or not pool.own:
            return None
        if not self.user_persists and not self.data_set_is_the_same():
            self.against_persistence = DATA_SET_CHANGES
            self.retire(pool)
            return None
        pool.next_pass(self.loader)
        return pool

    def data_set_is_the_same(self) -> bool:
        """Whether the last pool that was made still has the data set as it is now."""
        now = self._anatomy()
        return self._forked_from is not None and now.whole and now.change_from(self._forked_from) is None

    def script_changed_data_set(self) -> bool:
        """Whether the script, which has no workers, has changed its data set since this pass began."""
        return self.user.workers == 0 and self._surface_now() != self._surface

    def _surface_now(self) -> tuple[Any, ...]:
        return surface(self.loader.dataset, self.loader.collate_fn)

    def _anatomy(self) -> Anatomy:
        return anatomy(self.loader.dataset, self.loader.collate_fn)

    def retire(self, pool: Pool | None, failed: bool = False) -> None:
        """End a pool's workers. The script's own persistent ones are forgotten by its loader too."""
        if pool is None:
            return
        loader = self.loader
        if loader is not None and loader._iterator is pool.iterator:
            loader._iterator = None
        pool.retire(failed)
