from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.pq_cache import PQCache
from vllm_hisparse.algorithms.testing import REQUEST, SHAPE, chosen, random_keys, random_query, represent, retrieve

from .testing import best, group_of, make

OPTIONS = {"sink_tokens": 3, "window_tokens": 5, "num_bits": 3}


def decoded(state, num_tokens: int, kv_head: int) -> torch.Tensor:
    """Keys as their codes say: [num_tokens, head_size]."""
    codes, codebooks = state["codes"][REQUEST][:num_tokens, kv_head].long(), state["codebooks"][REQUEST, kv_head]
    return torch.cat([codebooks[part][codes[:, part]] for part in range(codes.shape[1])], -1)


@given(num_tokens=st.integers(1, 120), budget=st.sampled_from([8, 20, 64]), seed=st.integers(0, 1000))
def test_selects_by_the_products_with_decoded_keys(num_tokens: int, budget: int, seed: int) -> None:
    keys, query, algorithm = random_keys(num_tokens, seed), random_query(seed), make(PQCache, budget, **OPTIONS)
    state = represent(algorithm, keys, num_tokens - num_tokens // 4)
    selected = chosen(retrieve(algorithm, state, query, num_tokens))
    for kv_head in range(SHAPE.num_kv_heads):
        products = (decoded(state, num_tokens, kv_head) @ group_of(query, kv_head).T).max(-1).values
        kept = {p for p in range(num_tokens) if p < 3 or p >= num_tokens - 5}
        scores = {p: float(product) for p, product in enumerate(products) if p not in kept}
        expected = kept | best(scores, max(min(budget, num_tokens) - len(kept), 0))
        # Equal codes have equal products: which of those at the cut are taken is open.
        ranks = {p: round(scores.get(p, 1e9), 4) for p in range(num_tokens)}
        assert sorted(ranks[p] for p in selected[kv_head]) == sorted(ranks[p] for p in expected)


def test_a_code_is_the_nearest_centroid_of_each_part() -> None:
    algorithm, keys = make(PQCache, **OPTIONS), random_keys(90)
    state = represent(algorithm, keys, 70)
    for kv_head in range(SHAPE.num_kv_heads):
        for part in range(2):
            points = keys[:, kv_head].unflatten(-1, (2, -1))[:, part]
            distances = torch.cdist(points, state["codebooks"][REQUEST, kv_head, part])
            picked = distances.gather(1, state["codes"][REQUEST][:90, kv_head, part].long()[:, None])[:, 0]
            torch.testing.assert_close(picked, distances.min(-1).values)


def test_new_tokens_get_the_codes_of_the_prompts_codebook() -> None:
    """Incremental and from scratch: the codebook stays, so that codes do not depend on when a token came."""
    algorithm, keys = make(PQCache, **OPTIONS), random_keys(90)
    one_by_one = represent(algorithm, keys, 70)
    chunk = represent(algorithm, keys[:70], 70)
    algorithm.construct_representations(chunk, REQUEST, keys[70:], 70)
    for field in chunk:
        assert torch.equal(chunk[field][REQUEST][:90], one_by_one[field][REQUEST][:90])


def test_more_bits_are_closer() -> None:
    keys = random_keys(150)
    errors = []
    for bits in (1, 3, 5, 8):
        state = represent(make(PQCache, num_bits=bits), keys, 150)
        errors.append(float((decoded(state, 150, 0) - keys[:, 0]).square().mean()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-10 < errors[0]


def test_defaults_are_the_papers() -> None:
    options = PQCache.Options()
    assert (options.num_subspaces, options.num_bits) == (2, 6)
    assert PQCache.min_budget(options) == 64
    assert make(PQCache).state_entries == ((1, SHAPE.num_kv_heads * 2),)
