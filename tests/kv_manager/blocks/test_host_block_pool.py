import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_hisparse.kv_manager.blocks.host_block_pool import HostBlockPool, HostMatch

BLOCK_SIZE = 4


def make_pool(num_blocks: int = 8) -> HostBlockPool:
    return HostBlockPool(num_blocks, BLOCK_SIZE)


def snapshot(pool: HostBlockPool) -> bytes:
    """The whole state of a pool."""
    return pickle.dumps(pool)


def admit(pool: HostBlockPool, request_id: str, num_tokens: int, match: HostMatch | None = None) -> list[int]:
    block_ids = pool.allocate(request_id, num_tokens, match or HostMatch())
    pool.check_integrity()
    return list(block_ids)


def publish(pool: HostBlockPool, request_id: str, hashes: str) -> None:
    for index, block_hash in enumerate(hashes):
        pool.register(request_id, index, block_hash)
    pool.check_integrity()


def test_starts_free() -> None:
    pool = make_pool(5)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (5, 0, 0)
    pool.check_integrity()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocates_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    pool = make_pool()
    block_ids = admit(pool, "a", num_tokens)
    assert len(set(block_ids)) == num_blocks == pool.num_used
    assert pool.block_ids("a") == block_ids


def test_grow_appends_only_what_is_missing() -> None:
    pool = make_pool()
    before = admit(pool, "a", 5)
    pool.grow("a", 8)
    assert pool.block_ids("a") == before
    pool.grow("a", 9)
    pool.check_integrity()
    assert pool.block_ids("a")[:2] == before
    assert len(set(pool.block_ids("a"))) == 3


def test_allocate_is_all_or_nothing() -> None:
    pool = make_pool(4)
    admit(pool, "a", 8)
    publish(pool, "a", "xy")
    admit(pool, "b", 1)
    before = snapshot(pool)
    match = pool.cached_prefix("xy", 100)
    assert not pool.can_allocate(4 * BLOCK_SIZE + 1, match)
    with pytest.raises(MemoryError):
        pool.allocate("c", 4 * BLOCK_SIZE + 1, match)
    assert snapshot(pool) == before


def test_grow_is_all_or_nothing() -> None:
    pool = make_pool(3)
    admit(pool, "a", 4)
    admit(pool, "b", 4)
    before = snapshot(pool)
    assert not pool.can_grow("a", 3 * BLOCK_SIZE)
    with pytest.raises(MemoryError):
        pool.grow("a", 3 * BLOCK_SIZE)
    assert snapshot(pool) == before


def test_matched_blocks_do_not_count_as_room() -> None:
    pool = make_pool(3)
    admit(pool, "a", 12)
    publish(pool, "a", "xyz")
    pool.free("a")
    match = pool.cached_prefix("xy", 8)
    assert pool.can_allocate(12, match)
    assert not pool.can_allocate(13, match)
    block_ids = admit(pool, "b", 12, match)
    assert block_ids[:2] == list(match.block_ids)
    assert pool.cached_prefix("xyz", 12).num_tokens == 8  # the third was evicted


def test_refuses_to_admit_a_request_twice() -> None:
    pool = make_pool()
    admit(pool, "a", 1)
    with pytest.raises(AssertionError, match="a holds host blocks already"):
        pool.allocate("a", 1, HostMatch())


def test_unpublished_blocks_are_free_after_the_request() -> None:
    pool = make_pool(4)
    admit(pool, "a", 12)
    publish(pool, "a", "x")
    pool.free("a")
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 1, 0)


def test_cached_prefix_stops_at_the_first_gap_and_at_the_limit() -> None:
    pool = make_pool()
    block_ids = admit(pool, "a", 16)
    for index, block_hash in ((0, "w"), (1, "x"), (3, "z")):
        pool.register("a", index, block_hash)
    assert pool.cached_prefix("wxyz", 100) == HostMatch(block_ids[:2], 8)
    assert pool.cached_prefix("wxyz", 7) == HostMatch(block_ids[:1], 4)
    assert pool.cached_prefix("wxyz", 3) == HostMatch([], 0)
    assert pool.cached_prefix("vwx", 100) == HostMatch([], 0)


def test_shared_blocks_stay_until_the_last_owner_leaves() -> None:
    pool = make_pool(4)
    first = admit(pool, "a", 8)
    publish(pool, "a", "xy")
    second = admit(pool, "b", 12, pool.cached_prefix("xy", 8))
    assert second[:2] == first
    assert pool.num_used == 3
    pool.free("a")
    pool.check_integrity()
    assert (pool.num_used, pool.num_cached) == (3, 0)
    pool.free("b")
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached) == (2, 2)


def test_a_cached_hash_stays_with_its_block() -> None:
    pool = make_pool()
    first, second = admit(pool, "a", 4), admit(pool, "b", 4)
    publish(pool, "a", "x")
    publish(pool, "b", "x")
    assert pool.cached_prefix("x", 4).block_ids == first
    pool.free("b")
    assert (pool.num_free, pool.num_cached) == (7, 0)
    assert second[0] in iter(pool.take, None)
    pool.check_integrity()


def test_evicts_least_recently_used_and_tails_first() -> None:
    pool = make_pool(6)
    for request_id, hashes in (("a", "uv"), ("b", "wx"), ("c", "yz")):
        admit(pool, request_id, 8)
        publish(pool, request_id, hashes)
    for request_id in "bca":
        pool.free(request_id)
    assert pool.num_cached == 6
    evicted = []
    for step in range(6):
        admit(pool, f"new{step}", 1)
        evicted += [name for name in "uvwxyz" if pool.find(name) is None and name not in evicted]
    assert "".join(evicted) == "xwzyvu"


def test_a_hit_makes_blocks_recent() -> None:
    pool = make_pool(2)
    for request_id, name in (("a", "x"), ("b", "y")):
        admit(pool, request_id, 4)
        publish(pool, request_id, name)
    pool.free("a")
    pool.free("b")
    admit(pool, "c", 4, pool.cached_prefix("x", 4))
    pool.free("c")
    admit(pool, "d", 4)
    assert pool.cached_prefix("x", 4).num_tokens == 4
    assert pool.cached_prefix("y", 4).num_tokens == 0


def test_a_preempted_request_gets_its_tokens_back() -> None:
    pool = make_pool()
    before = admit(pool, "a", 11)
    publish(pool, "a", "xy")
    pool.preempt("a", 10)
    pool.check_integrity()
    assert pool.num_used == 0
    match = pool.retained_prefix("a", 10)
    assert match == HostMatch(before, 10)
    assert admit(pool, "a", 11, match) == before
    assert pool.retained_prefix("a", 10) == HostMatch()


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 9])
def test_preemption_frees_blocks_beyond_the_computed_tokens(num_tokens: int) -> None:
    pool = make_pool()
    before = admit(pool, "a", 20)
    pool.preempt("a", num_tokens)
    pool.check_integrity()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert (pool.num_cached, pool.num_free) == (num_blocks, 8 - num_blocks)
    assert pool.retained_prefix("a", 100) == HostMatch(before[:num_blocks], num_tokens)


def test_retained_prefix_respects_the_limit() -> None:
    pool = make_pool()
    before = admit(pool, "a", 8)
    pool.preempt("a", 8)
    assert pool.retained_prefix("a", 7) == HostMatch(before, 7)
    assert pool.retained_prefix("a", 4) == HostMatch(before[:1], 4)


def test_eviction_shortens_a_preempted_request_from_its_tail() -> None:
    pool = make_pool(4)
    before = admit(pool, "a", 15)
    pool.preempt("a", 14)
    admit(pool, "b", 1)
    assert pool.retained_prefix("a", 14) == HostMatch(before[:3], 12)
    admit(pool, "c", 5)
    assert pool.retained_prefix("a", 14) == HostMatch(before[:1], 4)


def test_private_blocks_serve_nobody_else() -> None:
    pool = make_pool()
    admit(pool, "a", 8)
    publish(pool, "a", "x")
    pool.preempt("a", 6)
    assert pool.retained_prefix("b", 100) == HostMatch()
    assert pool.cached_prefix("xy", 100).num_tokens == 4


def test_resuming_without_the_retained_prefix_drops_it() -> None:
    pool = make_pool(4)
    admit(pool, "a", 7)
    pool.preempt("a", 7)
    admit(pool, "a", 7)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 2)
    assert pool.retained_prefix("a", 7) == HostMatch()


def test_forget_frees_what_only_the_request_could_claim() -> None:
    pool = make_pool(4)
    admit(pool, "a", 10)
    publish(pool, "a", "x")
    pool.preempt("a", 10)
    pool.forget("a")
    pool.check_integrity()
    assert (pool.num_cached, pool.num_free) == (1, 3)
    assert pool.retained_prefix("a", 10) == HostMatch()
    pool.forget("a")
    pool.forget("unknown")
    pool.check_integrity()


def test_reset_cache_forgets_everything_but_running_requests() -> None:
    pool = make_pool()
    for request_id, hashes in (("a", "uv"), ("b", "wx"), ("c", "yz")):
        admit(pool, request_id, 8)
        publish(pool, request_id, hashes)
    pool.free("a")
    pool.preempt("b", 7)
    running = list(pool.block_ids("c"))
    pool.reset_cache()
    pool.check_integrity()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 6)
    assert pool.block_ids("c") == running
    assert pool.retained_prefix("b", 7) == HostMatch()
    assert all(pool.cached_prefix(name, 4).num_tokens == 0 for name in "uvwxyz")


def test_a_private_key_never_names_later_contents() -> None:
    """Two requests share a block that lost its hash; what one of them writes later is not the other's prefix."""
    pool = make_pool(4)
    admit(pool, "a", 8)
    publish(pool, "a", "x")
    shared = admit(pool, "b", 8, pool.cached_prefix("x", 4))[0]
    pool.reset_cache()
    pool.preempt("a", 4)
    pool.preempt("b", 4)
    admit(pool, "a", 8)  # from scratch: skips the prefix cache
    pool.preempt("a", 1)
    assert tuple(pool.retained_prefix("b", 4).block_ids) in ((), (shared,))


def test_pinned_blocks_are_neither_evicted_nor_freed_until_they_are_unpinned() -> None:
    pool = make_pool()
    block_ids = list(admit(pool, "a", 8))
    publish(pool, "a", "x")
    num_free = pool.num_free
    pool.pin(block_ids)
    pool.free("a")
    assert (pool.num_free, pool.num_cached) == (num_free, 0)
    assert list(pool.cached_prefix("x", 4).block_ids) == block_ids[:1], "but found"
    pool.check_integrity()
    pool.unpin(block_ids)
    assert (pool.num_free, pool.num_cached) == (num_free + 1, 1)
    pool.check_integrity()


def test_a_preempted_request_may_resume_from_pinned_blocks() -> None:
    pool = make_pool()
    block_ids = list(admit(pool, "a", 8))
    pool.pin(block_ids)
    pool.preempt("a", 6)
    assert pool.num_cached == 0
    match = pool.retained_prefix("a", 6)
    assert list(admit(pool, "a", 8, match)) == block_ids
    pool.unpin(block_ids)
    pool.check_integrity()
    assert pool.num_used == 2


def test_blocks_without_an_owner_cannot_be_pinned() -> None:
    with pytest.raises(AssertionError, match="has no owner"):
        make_pool().pin([0])


def containers(part: object) -> Iterator[Any]:
    """Everything that a pool keeps in a list, a deque or a dictionary, its keys' state included."""
    for value in vars(part).values():
        if isinstance(value, list | deque | dict):
            yield from [value] if value else []
        elif hasattr(value, "__dict__"):
            yield from containers(value)


def lose_first(container: Any) -> None:
    del container[next(iter(container)) if isinstance(container, dict) else 0]


def add_again(container: Any) -> None:
    """Repeat an entry, under another name if names are unique."""
    if isinstance(container, dict):
        known = next(iter(container))
        container["another name" if isinstance(known, str) else known - 1] = container[known]
    else:
        container.append(container[0])


def used_pool() -> HostBlockPool:
    """Two used blocks, one of them published, and a cached block."""
    pool = make_pool()
    admit(pool, "a", 8)
    publish(pool, "a", "x")
    admit(pool, "b", 4)
    publish(pool, "b", "y")
    pool.free("b")
    return pool


@pytest.mark.parametrize("damage", [lose_first, add_again])
def test_check_integrity_finds_damage(damage: Callable[[Any], None]) -> None:
    # requests, free and cached blocks, references, pins, keys by block, blocks by key
    assert len(list(containers(used_pool()))) == 7
    for index in range(7):
        pool = used_pool()
        damage(list(containers(pool))[index])
        with pytest.raises(AssertionError):
            pool.check_integrity()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.block_ids("a").append(pool.block_ids("a")[0]),
        lambda pool: pool.block_ids("a").pop(),
        lambda pool: pool.block_ids("a").append(pool.find("y")),
        lambda pool: pool.unpin(pool.block_ids("a")),
    ],
)
def test_check_integrity_finds_misuse(misuse: Callable[[HostBlockPool], None]) -> None:
    pool = used_pool()
    misuse(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@dataclass
class ModelRequest:
    """A request's tokens: a stem that others share, then its own; a token names everything before it."""

    name: str
    stem: int
    stem_tokens: int
    num_written: int = 0
    num_registered: int = 0
    block_ids: list[int] = field(default_factory=list)
    keys: list = field(default_factory=list)  # of its blocks when it was preempted

    def token(self, position: int) -> tuple:
        return (self.stem, position) if position < self.stem_tokens else (self.name, position)

    def block(self, index: int, num_tokens: int = BLOCK_SIZE) -> list[tuple]:
        return [self.token(index * BLOCK_SIZE + offset) for offset in range(num_tokens)]

    def hashes(self) -> list[tuple]:
        return [self.token((index + 1) * BLOCK_SIZE - 1) for index in range(16)]


class HostBlockPoolMachine(RuleBasedStateMachine):
    """The pool against a naive model that also knows what each block contains."""

    NUM_BLOCKS = 7

    def __init__(self):
        super().__init__()
        self.pool = HostBlockPool(self.NUM_BLOCKS, BLOCK_SIZE)
        self.contents: dict[int, list] = {block_id: [None] * BLOCK_SIZE for block_id in range(self.NUM_BLOCKS)}
        self.running: dict[str, ModelRequest] = {}
        self.preempted: dict[str, ModelRequest] = {}
        self.evictable: list[int] = []  # least recently used first
        self.keys: dict[object, int] = {}
        self.pinned: list[list[int]] = []
        self.num_requests = 0

    # A model of the pool, step by step

    def key_of(self, block_id: int) -> object:
        return next((key for key, keyed in self.keys.items() if keyed == block_id), None)

    def is_used(self, block_id: int) -> bool:
        owned = [request.block_ids for request in self.running.values()]
        return any(block_id in block_ids for block_ids in owned + self.pinned)

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            if not self.is_used(block_id) and self.key_of(block_id) is not None:
                self.evictable.append(block_id)

    def drop_private_keys(self, request: ModelRequest) -> None:
        for key in request.keys:
            if key[0] == "private" and key in self.keys:
                block_id = self.keys.pop(key)
                if block_id in self.evictable:
                    self.evictable.remove(block_id)

    def expect_taken(self, taken: list[int], free: set[int]) -> None:
        """New blocks are free ones, then the least recently used."""
        num_evicted = max(len(taken) - len(free), 0)
        evicted, self.evictable = self.evictable[:num_evicted], self.evictable[num_evicted:]
        assert set(taken) <= free | set(evicted)
        assert len(set(taken)) == len(taken)
        if num_evicted:
            assert set(taken) == free | set(evicted)
        for block_id in evicted:
            del self.keys[self.key_of(block_id)]
        for block_id in taken:
            self.contents[block_id] = [None] * BLOCK_SIZE

    def free_blocks(self) -> set[int]:
        return {b for b in range(self.NUM_BLOCKS) if b not in self.evictable and not self.is_used(b)}

    def check_contents(self, request: ModelRequest, match: HostMatch) -> None:
        for index, block_id in enumerate(match.block_ids):
            num_tokens = min(match.num_tokens - index * BLOCK_SIZE, BLOCK_SIZE)
            assert self.contents[block_id][:num_tokens] == request.block(index, num_tokens), "another prefix's block"

    def expected_retained(self, request: ModelRequest, limit: int) -> HostMatch:
        limit = min(limit, request.num_written)
        block_ids = []
        for key in request.keys[: -(-limit // BLOCK_SIZE)]:
            if key not in self.keys:
                break
            block_ids.append(self.keys[key])
        return HostMatch(block_ids, min(limit, len(block_ids) * BLOCK_SIZE))

    def retained(self, request: ModelRequest, limit: int) -> HostMatch:
        match = self.pool.retained_prefix(request.name, limit)
        return HostMatch(list(match.block_ids), match.num_tokens)

    # Operations of schedulers

    def admit(self, request: ModelRequest, num_tokens: int, use: str) -> None:
        retained = self.pool.retained_prefix(request.name, num_tokens - 1)
        cached = self.pool.cached_prefix(request.hashes(), num_tokens - 1)
        self.check_contents(request, retained)
        self.check_contents(request, cached)
        match = {"best": max(retained, cached, key=lambda m: m.num_tokens), "cached": cached, "none": HostMatch()}[use]
        before = snapshot(self.pool)
        fits = self.pool.can_allocate(num_tokens, match)
        num_new = -(-num_tokens // BLOCK_SIZE) - len(match.block_ids)
        num_room = len(self.free_blocks()) + len(set(self.evictable) - set(match.block_ids))
        assert fits == (num_new <= num_room)
        try:
            block_ids = list(self.pool.allocate(request.name, num_tokens, match))
        except MemoryError:
            assert not fits
            assert snapshot(self.pool) == before, "a failed allocation left traces"
            return
        assert fits
        assert block_ids[: len(match.block_ids)] == list(match.block_ids)
        for block_id in match.block_ids:
            key = self.key_of(block_id)
            if key is not None and key[0] == "private":
                del self.keys[key]
            if block_id in self.evictable:
                self.evictable.remove(block_id)
        self.drop_private_keys(request)
        self.preempted.pop(request.name, None)
        request.keys = []
        request.block_ids = list(match.block_ids)
        self.running[request.name] = request
        free = self.free_blocks()
        self.expect_taken(block_ids[len(match.block_ids) :], free)
        request.block_ids = block_ids
        request.num_written = match.num_tokens
        request.num_registered = match.num_tokens // BLOCK_SIZE

    @rule(
        stem=st.integers(0, 1),
        stem_tokens=st.integers(0, 14),
        num_tokens=st.integers(1, 24),
        use=st.sampled_from(["best", "best", "none"]),
    )
    def start(self, stem: int, stem_tokens: int, num_tokens: int, use: str) -> None:
        self.num_requests += 1
        self.admit(ModelRequest(f"r{self.num_requests}", stem, stem_tokens), num_tokens, use)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), extra=st.integers(1, 5), use=st.sampled_from(["best", "best", "best", "cached", "none"]))
    def resume(self, data: st.DataObject, extra: int, use: str) -> None:
        request = self.preempted[data.draw(st.sampled_from(sorted(self.preempted)))]
        num_tokens = request.num_written + extra
        expected = self.expected_retained(request, num_tokens - 1)
        assert self.retained(request, num_tokens - 1) == expected
        self.admit(request, num_tokens, use)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), publish=st.booleans())
    def write(self, data: st.DataObject, num_tokens: int, publish: bool) -> None:
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        last = min(request.num_written + num_tokens, len(request.block_ids) * BLOCK_SIZE)
        for position in range(request.num_written, last):
            block_id = request.block_ids[position // BLOCK_SIZE]
            assert sum(block_id in other.block_ids for other in self.running.values()) == 1, "writes a shared block"
            self.contents[block_id][position % BLOCK_SIZE] = request.token(position)
        request.num_written = last
        num_full = last // BLOCK_SIZE
        if publish:
            for index in range(request.num_registered, num_full):
                block_id, block_hash = request.block_ids[index], request.hashes()[index]
                self.pool.register(request.name, index, block_hash)
                if self.key_of(block_id) is None and block_hash not in self.keys:
                    self.keys[block_hash] = block_id
            request.num_registered = max(request.num_registered, num_full)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        target = len(request.block_ids) * BLOCK_SIZE + num_tokens
        before, free = snapshot(self.pool), self.free_blocks()
        fits = self.pool.can_grow(request.name, target)
        assert fits == (-(-num_tokens // BLOCK_SIZE) <= len(free) + len(self.evictable))
        try:
            self.pool.grow(request.name, target)
        except MemoryError:
            assert not fits
            assert snapshot(self.pool) == before, "a failed growth left traces"
            return
        block_ids = list(self.pool.block_ids(request.name))
        assert block_ids[: len(request.block_ids)] == request.block_ids
        self.expect_taken(block_ids[len(request.block_ids) :], free)
        request.block_ids = block_ids

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.pool.preempt(request.name, request.num_written)
        for index, block_id in enumerate(request.block_ids[: -(-request.num_written // BLOCK_SIZE)]):
            key = self.key_of(block_id)
            if key is None:
                key = ("private", request.name, index)
                self.keys[key] = block_id
            elif key[0] == "private":
                break
            request.keys.append(key)
        self.release(request.block_ids)
        request.block_ids = []
        self.preempted[request.name] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block_ids = list(self.running[data.draw(st.sampled_from(sorted(self.running)))].block_ids)
        self.pool.pin(block_ids)
        self.pinned.append(block_ids)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block_ids = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.pool.unpin(block_ids)
        self.release(block_ids)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.pool.free(request.name)
        self.release(request.block_ids)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def abort_preempted(self, data: st.DataObject) -> None:
        request = self.preempted.pop(data.draw(st.sampled_from(sorted(self.preempted))))
        self.pool.forget(request.name)
        self.drop_private_keys(request)

    @precondition(lambda self: not self.running)
    @rule()
    def reset_cache_idle(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.pool.reset_cache()
        self.keys.clear()
        self.evictable.clear()
        for request in self.preempted.values():
            request.keys, request.num_written = [], 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        taken = list(iter(pickle.loads(snapshot(self.pool)).take, None))
        assert taken[self.pool.num_free :] == self.evictable, "eviction order"
        assert set(taken[: self.pool.num_free]) == self.free_blocks()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.NUM_BLOCKS
        assert {name: list(self.pool.block_ids(name)) for name in self.running} == {
            name: request.block_ids for name, request in self.running.items()
        }

    @invariant()
    def running_requests_keep_what_they_wrote(self) -> None:
        for request in self.running.values():
            for position in range(request.num_written):
                block_id = request.block_ids[position // BLOCK_SIZE]
                assert self.contents[block_id][position % BLOCK_SIZE] == request.token(position)

    def teardown(self) -> None:
        for name in sorted(self.running):
            self.pool.free(name)
        for block_ids in self.pinned:
            self.pool.unpin(block_ids)
        for name in sorted(self.preempted):
            self.pool.forget(name)
        self.pool.reset_cache()
        self.pool.check_integrity()
        assert self.pool.num_free == self.NUM_BLOCKS, "blocks were lost"


class ResetWhileRunningMachine(HostBlockPoolMachine):
    """Resets beside running requests too, so that requests share blocks without a hash."""

    @rule()
    def reset_cache(self) -> None:
        self.reset()


TestHostBlockPool = pytest.mark.long(HostBlockPoolMachine.TestCase)
TestResetWhileRunning = pytest.mark.long(ResetWhileRunningMachine.TestCase)
