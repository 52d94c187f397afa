"""Checks of an algorithm without an engine, for its author: `vllm-hisparse check-algorithm`, or `check` in a test.

Requests have random keys, and the state that an algorithm finds holds NaN or invalid numbers, as former requests may
have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_hisparse.algorithms.base import AttentionShape, SparseAlgorithm, State, check_selection
from vllm_hisparse.algorithms.registry import AlgorithmRefused, check_class, find_algorithm
from vllm_hisparse.ops.paged_field import PagedField

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_size=16, dtype=torch.float32)
NUM_REQUESTS = 4  # of a state
REQUEST = 2  # index of the request that the checks look at; the others hold NaN, or invalid numbers
ENTRIES_PER_BLOCK = 3
NUM_QUERIES = 3  # with which two states are compared


class AlgorithmError(AssertionError):
    """An algorithm breaks a rule of `SparseAlgorithm`; the message says what was expected and what was found."""


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of NaN, or of numbers that are too large for an index."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, 250), dtype=dtype)


def poisoned_state(algorithm: SparseAlgorithm, num_requests: int) -> State:
    """Make the state of one layer, as former requests may have left it.

    Fields that grow are in small blocks in any order; block 0 belongs to no request.
    """
    state: State = {}
    for name, field in algorithm.fixed_fields.items():
        state[name] = poison((num_requests, *field.shape), field.dtype)
    for name, field in algorithm.growing_fields.items():
        num_entries = field.num_entries(algorithm.max_tokens)
        max_blocks = -(-num_entries // ENTRIES_PER_BLOCK)
        order = torch.randperm(num_requests * max_blocks, generator=torch.Generator().manual_seed(len(name)))
        blocks = poison((1 + len(order), ENTRIES_PER_BLOCK, *field.shape), field.dtype)
        state[name] = PagedField((order + 1).view(num_requests, max_blocks).int(), blocks, num_entries)
    return state


def random_keys(num_tokens: int, seed: int = 0, shape: AttentionShape = SHAPE) -> torch.Tensor:
    """Return keys with directions that attract and channels that stand out: [num_tokens, num_kv_heads, head_size]."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(7, shape.num_kv_heads, shape.head_size, generator=generator) * 2
    keys = centers[torch.randint(7, (num_tokens,), generator=generator)]
    return (keys + torch.randn(keys.shape, generator=generator)).to(shape.dtype)


def random_query(seed: int = 1, shape: AttentionShape = SHAPE) -> torch.Tensor:
    """Return a query: [1, num_heads, head_size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, shape.num_heads, shape.head_size, generator=generator).to(shape.dtype)


def construct(algorithm: SparseAlgorithm, state: State, keys: torch.Tensor, first: int, last: int) -> None:
    """Represent positions [first, last) of the request's `keys` at once."""
    algorithm.construct_representations(state, REQUEST, keys[first:last], first)


def update(algorithm: SparseAlgorithm, state: State, key: torch.Tensor, position: int) -> None:
    """Represent one new token of the request. key: [num_kv_heads, head_size]."""
    algorithm.update_representations(state, torch.tensor([REQUEST]), key[None], torch.tensor([position]))


def represent(
    algorithm: SparseAlgorithm,
    keys: torch.Tensor,
    num_prompt: int,
    cuts: tuple[int, ...] = (),
    state: State | None = None,
) -> State:
    """Represent the first `num_prompt` keys in chunks cut at `cuts`, then the others one by one.

    Returns:
        The state; a new one if `state` is None.
    """
    state = poisoned_state(algorithm, NUM_REQUESTS) if state is None else state
    for first, last in pairwise([0, *cuts, num_prompt]):
        construct(algorithm, state, keys, first, last)
    for position in range(num_prompt, len(keys)):
        update(algorithm, state, keys[position], position)
    return state


def retrieve(algorithm: SparseAlgorithm, state: State, query: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the selection of the request: [1, num_kv_heads, num_selected] int32."""
    return algorithm.retrieve_topk(state, torch.tensor([REQUEST]), query, torch.tensor([num_tokens]))


def chosen(selection: torch.Tensor) -> list[set[int]]:
    """Return the selected units of each KV head of one request.

    Args:
        selection: [1, num_kv_heads, num_selected].

    Raises:
        AlgorithmError: a unit repeats, the newest is not the last one, or a valid unit follows padding.
    """
    result = []
    for units in selection[0].tolist():
        valid = [unit for unit in units if unit >= 0]
        _expect(units == valid + [-1] * (len(units) - len(valid)), f"valid units first, then -1; got {units}")
        _expect(len(set(valid)) == len(valid), f"distinct units; got {units}")
        _expect(not valid or valid[-1] == max(valid), f"the newest token's unit last; got {units}")
        result.append(set(valid))
    return result


def _expect(holds: bool, expected: str) -> None:
    if not holds:
        raise AlgorithmError(f"expected {expected}")


class _HostReads(TorchFunctionMode):
    """Refuses calls that read values on the host."""

    NAMES = frozenset({"tolist", "item", "cpu", "numpy", "__array__"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        _expect(name not in self.NAMES, f"no operation that waits for the device; got {name}")
        return func(*args, **(kwargs or {}))


class _WaitingOperations(TorchDispatchMode):
    """Refuses operations that wait for the device, or whose result has a size that depends on values."""

    NAMES = frozenset(
        (
            *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "repeat_interleave"),
            *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        )
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        # NOTE: a number that is written under a mask is a fill by the mask, which waits for nothing.
        is_fill = name.startswith("index_put") and args[2].dim() == 0 and args[2].device.type == "cpu"
        by_mask = not is_fill and any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices
        )
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        _expect(
            (name not in self.NAMES or sized) and not by_mask,
            f"no operation that waits for the device; got {'an index by a mask' if by_mask else name}",
        )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Subject:
    """The algorithm that is checked, with its options.

    Attributes:
        algorithm: the class.
        options: its parsed options.
        shape: sizes of the layers.
    """

    algorithm: type[SparseAlgorithm]
    options: Any
    shape: AttentionShape = SHAPE

    @property
    def unit(self) -> int:
        return self.algorithm.unit_tokens(self.options)

    @cached_property
    def least(self) -> int:
        """Tokens of the smallest budget."""
        return -(-self.algorithm.min_budget(self.options) // self.unit) * self.unit

    def length(self, tokens: int) -> int:
        """Return the length of a request that has at least `tokens` more than are always selected."""
        return self.least + tokens * self.scale

    @property
    def scale(self) -> int:
        """Factor of lengths, with which a request has many units."""
        return max(1, self.unit // 4)

    @property
    def max_tokens(self) -> int:
        return self.length(200)

    @property
    def budget(self) -> int:
        """A small budget, which has room for a choice."""
        return self.least + 8 * self.unit

    def make(self, budget: int | None = None, max_query_len: int = 1) -> SparseAlgorithm:
        return self.algorithm(self.options, self.shape, budget or self.budget, self.max_tokens, max_query_len)

    def keys(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        return random_keys(num_tokens, seed, self.shape)

    def query(self, seed: int) -> torch.Tensor:
        return random_query(seed, self.shape)

    def selections(self, algorithm: SparseAlgorithm, state: State, num_tokens: int) -> list[list[set[int]]]:
        """Return what some queries select."""
        return [chosen(retrieve(algorithm, state, self.query(seed), num_tokens)) for seed in range(1, NUM_QUERIES + 1)]


def check_selections(subject: Subject) -> None:
    """A selection has the right shape and dtype, fits the budget, and includes the newest unit."""
    _check_selections(subject)


def check_dtype(subject: Subject) -> None:
    """The same holds for keys and queries in bfloat16."""
    _check_selections(replace(subject, shape=replace(subject.shape, dtype=torch.bfloat16)))


def _check_selections(subject: Subject) -> None:
    algorithm = subject.make()
    for num_prompt, num_new in ((0, 1), (1, 1), (subject.length(3), 2), (subject.length(70), 9)):
        num_tokens = num_prompt + num_new
        state = represent(algorithm, subject.keys(num_tokens, num_prompt), num_prompt)
        selection = retrieve(algorithm, state, subject.query(num_tokens), num_tokens)
        check_selection(algorithm, selection, 1)
        newest = (num_tokens - 1) // subject.unit
        for units in chosen(selection):
            _expect(newest in units, f"unit {newest} of the newest of {num_tokens} tokens; got {sorted(units)}")
            _expect(max(units) <= newest, f"no unit beyond the {num_tokens} tokens; got {sorted(units)}")


def check_everything(subject: Subject) -> None:
    """A budget of all tokens selects all units."""
    num_tokens = subject.length(90)
    algorithm = subject.make(-(-subject.max_tokens // subject.unit) * subject.unit)
    state = represent(algorithm, subject.keys(num_tokens), subject.length(70))
    everything = set(range(-(-num_tokens // subject.unit)))
    for units in chosen(retrieve(algorithm, state, subject.query(1), num_tokens)):
        missing = sorted(everything - units)
        _expect(not missing, f"all {len(everything)} units with a budget of all tokens; without {missing[:8]}")


def check_no_tokens(subject: Subject) -> None:
    """A place without tokens selects nothing."""
    algorithm = subject.make()
    state = represent(algorithm, subject.keys(subject.length(40)), subject.length(40))
    selection = retrieve(algorithm, state, subject.query(1), 0)
    _expect(bool((selection == -1).all()), f"only -1 for a place without tokens; got {selection[0].tolist()}")


def check_batch(subject: Subject) -> None:
    """Requests of a batch select what each of them selects alone."""
    algorithm = subject.make()
    lengths = {0: subject.length(30), 3: subject.length(77), 1: subject.length(9)}
    keys = {request: subject.keys(length + 1, request) for request, length in lengths.items()}
    together, requests = poisoned_state(algorithm, NUM_REQUESTS), torch.tensor(list(lengths))
    for request, length in lengths.items():
        algorithm.construct_representations(together, request, keys[request][:length], 0)
    newest = torch.stack([keys[request][-1] for request in lengths])
    positions = torch.tensor(list(lengths.values()))
    algorithm.update_representations(together, requests, newest, positions)
    query = torch.cat([subject.query(request + 1) for request in lengths])
    selection = algorithm.retrieve_topk(together, requests, query, positions + 1)
    check_selection(algorithm, selection, len(lengths))
    padded = algorithm.retrieve_topk(
        together, requests[[0, 1, 2, 2]], query[[0, 1, 2, 2]], torch.cat([positions + 1, torch.zeros(1).long()])
    )
    _expect(torch.equal(padded[:3], selection), "the same selection beside padding, which may repeat a request")
    for index, (request, length) in enumerate(lengths.items()):
        alone = represent(algorithm, keys[request], length)
        expected = chosen(retrieve(algorithm, alone, query[index : index + 1], length + 1))
        got = chosen(selection[index : index + 1])
        _expect(got == expected, f"what the request selects alone, {expected}; got {got}")


def check_state_is_kept(subject: Subject) -> None:
    """`retrieve_topk` changes no state."""
    algorithm, num_tokens = subject.make(), subject.length(50)
    state = represent(algorithm, subject.keys(num_tokens), subject.length(40))
    before = {name: _bytes_of(field).clone() for name, field in state.items()}
    retrieve(algorithm, state, subject.query(1), num_tokens)
    for name, field in state.items():
        _expect(torch.equal(_bytes_of(field), before[name]), f"a retrieve_topk that leaves the field {name!r} as it is")


def _bytes_of(field: torch.Tensor | PagedField) -> torch.Tensor:
    values = field.blocks if isinstance(field, PagedField) else field
    return values.contiguous().view(torch.uint8)


def check_chunks(subject: Subject) -> None:
    """The selection does not depend on how a prompt is divided, or on which of its tokens were new ones."""
    algorithm, num_tokens = subject.make(), subject.length(90)
    keys = subject.keys(num_tokens)
    if algorithm.needs_whole_prompt:
        return
    expected = subject.selections(algorithm, represent(algorithm, keys, num_tokens), num_tokens)
    for num_prompt, cuts in (
        (num_tokens, (1, subject.length(33), subject.length(34))),
        (subject.length(61), (subject.length(17),)),
        (0, ()),
    ):
        state = represent(algorithm, keys, num_prompt, cuts)
        got = subject.selections(algorithm, state, num_tokens)
        _expect(got == expected, f"the selection of one chunk; other with chunks cut at {cuts}, up to {num_prompt}")


def check_represented_again(subject: Subject) -> None:
    """A prompt that goes on from the start of a unit replaces what was represented from there on."""
    algorithm, num_tokens = subject.make(), subject.length(90)
    keys, turn = subject.keys(num_tokens), subject.length(41)
    expected = subject.selections(algorithm, represent(algorithm, keys, num_tokens), num_tokens)
    state = represent(algorithm, torch.cat([keys[:turn], subject.keys(20 * subject.scale, 5) * 30]), turn)
    first = 0 if algorithm.needs_whole_prompt else turn - turn % subject.unit
    construct(algorithm, state, keys, first, num_tokens)
    got = subject.selections(algorithm, state, num_tokens)
    _expect(got == expected, f"tokens from {first} on to be forgotten when positions from {first} on come again")


def check_layers(subject: Subject) -> None:
    """All state is in the fields, because one object serves all layers."""
    algorithm, num_prompt, num_tokens = subject.make(), subject.length(50), subject.length(60)
    layers = [subject.keys(num_tokens, seed) for seed in (11, 12)]
    expected = [
        subject.selections(subject.make(), represent(subject.make(), keys, num_prompt), num_tokens) for keys in layers
    ]
    states = [represent(algorithm, keys[:num_prompt], num_prompt) for keys in layers]
    for position in range(num_prompt, num_tokens):
        for keys, state in zip(layers, states, strict=True):
            update(algorithm, state, keys[position], position)
    got = [subject.selections(algorithm, state, num_tokens) for state in states]
    _expect(got == expected, "what a layer selects alone; something is kept outside of the fields")


def check_restart(subject: Subject) -> None:
    """A request that starts finds nothing of the request before it."""
    algorithm, num_tokens = subject.make(), subject.length(60)
    keys = subject.keys(num_tokens)
    expected = subject.selections(algorithm, represent(algorithm, keys, subject.length(50)), num_tokens)
    state = represent(algorithm, subject.keys(subject.length(150), 7) * 30, subject.length(140))
    represent(algorithm, keys, subject.length(50), state=state)
    got = subject.selections(algorithm, state, num_tokens)
    _expect(got == expected, "nothing left of the request that had the place before")


def check_drafts(subject: Subject) -> None:
    """Rejected drafts leave nothing behind, if the class says so."""
    if not subject.algorithm.forgets_drafts:
        return
    max_query_len, num_prompt = 4, subject.length(40)
    algorithm, plain = subject.make(max_query_len=max_query_len), subject.make()
    keys = subject.keys(subject.length(90))
    state, expected_state = (represent(each, keys[:num_prompt], num_prompt) for each in (algorithm, plain))
    position, steps = num_prompt, 0
    while position + max_query_len <= len(keys):
        num_right = (1, 2, 4, 1, 3)[steps % 5]
        for index in range(max_query_len):
            is_right = index < num_right
            key = keys[position + index] if is_right else subject.keys(1, 1000 * steps + index)[0] * 30
            update(algorithm, state, key, position + index)
            if not is_right:
                continue
            update(plain, expected_state, key, position + index)
            num_tokens, query = position + index + 1, subject.query(position + index)
            got, expected = (
                chosen(retrieve(each, one, query, num_tokens))
                for each, one in ((algorithm, state), (plain, expected_state))
            )
            _expect(got == expected, f"what token {num_tokens - 1} selects without drafts, {expected}; got {got}")
        position, steps = position + num_right, steps + 1


def check_host_reads(subject: Subject) -> None:
    """`retrieve_topk` reads no value on the host; with `graph_capturable`, neither does `update_representations`."""
    algorithm, num_tokens = subject.make(), subject.length(50)
    keys = subject.keys(num_tokens + 1)
    state = represent(algorithm, keys[:num_tokens], num_tokens)
    requests, positions = torch.tensor([REQUEST]), torch.tensor([num_tokens])
    query, num_all = subject.query(1), positions + 1
    with ExitStack() as stack:
        if algorithm.graph_capturable:
            stack.enter_context(_HostReads())
            stack.enter_context(_WaitingOperations())
        algorithm.update_representations(state, requests, keys[num_tokens:], positions)
    with _HostReads(), _WaitingOperations():
        algorithm.retrieve_topk(state, requests, query, num_all)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_selections,
    check_dtype,
    check_everything,
    check_no_tokens,
    check_batch,
    check_state_is_kept,
    check_chunks,
    check_represented_again,
    check_layers,
    check_restart,
    check_drafts,
    check_host_reads,
)


def results(
    algorithm: str | type[SparseAlgorithm], options: dict[str, Any] | None = None, shape: AttentionShape = SHAPE
) -> Iterator[tuple[str, Exception | None]]:
    """Yield the rule of each check, and the error with which it fails; None if it passes.

    Args:
        algorithm: class, or its dotted path.
        options: `algorithm_options`; None: the defaults.
        shape: sizes of the layers.

    Raises:
        AlgorithmRefused: there is no such algorithm, or it cannot be used.
        ValidationError: an option is unknown or out of range.
    """
    cls = find_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    if not issubclass(cls, SparseAlgorithm) or cls.model_family != "gqa":
        raise AlgorithmRefused("an algorithm for dense models, such as quest", "Name another one.")
    parsed = cls.Options(**(options or {}))
    check_class(cls, parsed)
    subject = Subject(cls, parsed, shape)
    refused = cls.refuse(parsed, shape)
    if refused is not None:
        raise AlgorithmRefused(f"for heads of {shape.head_size} elements: {refused}", "Pass the sizes of your model.")
    for each in CHECKS:
        error: Exception | None = None
        try:
            each(subject)
        except Exception as found:  # NOTE: an algorithm may raise anything
            error = found
        yield (each.__doc__ or each.__name__).strip(), error


def check(
    algorithm: str | type[SparseAlgorithm], options: dict[str, Any] | None = None, shape: AttentionShape = SHAPE
) -> None:
    """Run all checks, for a test; arguments as in `results`.

    Raises:
        AlgorithmError, or what the algorithm raises: the first check that fails.
    """
    for _, error in results(algorithm, options, shape):
        if error is not None:
            raise error
