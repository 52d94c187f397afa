from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_hisparse.algorithms.cluster_kv import UNCLUSTERED, ClusterKV
from vllm_hisparse.algorithms.testing import (
    REQUEST,
    SHAPE,
    chosen,
    poisoned_state,
    random_keys,
    random_query,
    represent,
    retrieve,
)

from .testing import group_of, make

OPTIONS = {"sink_tokens": 3, "tokens_per_cluster": 9, "update_interval": 7, "clusters_per_update": 2}


def cluster_members(state, num_tokens: int, kv_head: int) -> dict[int, set[int]]:
    """Cluster -> positions; UNCLUSTERED for sinks and pending tokens."""
    members: dict[int, set[int]] = {}
    for position, label in enumerate(state["labels"][REQUEST][:num_tokens, kv_head].tolist()):
        members.setdefault(label, set()).add(position)
    return members


@pytest.mark.long
@given(num_prompt=st.integers(0, 90), num_new=st.integers(0, 40))
@example(num_prompt=0, num_new=30)
@example(num_prompt=2, num_new=30)
def test_clusters_partition_the_tokens(num_prompt: int, num_new: int) -> None:
    """All but sinks and pending tokens, in clusters of the prompt or of one interval."""
    algorithm, num_tokens = make(ClusterKV, **OPTIONS), num_prompt + num_new
    state = represent(algorithm, random_keys(num_tokens), num_prompt)
    first_new = max(num_prompt, 3)
    num_clustered = max(num_tokens - first_new, 0) // 7 * 7
    pending = set(range(first_new + num_clustered, num_tokens))
    num_prompt_clusters = -(-max(num_prompt - 3, 0) // 9)
    for kv_head in range(SHAPE.num_kv_heads):
        members = cluster_members(state, num_tokens, kv_head)
        assert members.pop(UNCLUSTERED, set()) == set(range(min(3, num_tokens))) | pending
        for cluster, positions in members.items():
            assert 0 <= cluster < state["num_clusters"][REQUEST]
            if cluster < num_prompt_clusters:
                assert max(positions) < num_prompt
            else:
                interval = (cluster - num_prompt_clusters) // 2
                assert {(position - first_new) // 7 for position in positions} == {interval}


def test_tokens_that_come_after_the_prompt_are_clustered_as_generated_ones() -> None:
    """However they come: a decoding request may be among those that prefill."""
    algorithm, keys = make(ClusterKV, **OPTIONS), random_keys(60)
    generated = represent(algorithm, keys, 40)
    mixed = represent(algorithm, keys[:45], 40)
    for position in range(45, 60):
        algorithm.construct_representations(mixed, REQUEST, keys[position : position + 1], position)
    assert mixed["num_clusters"][REQUEST] == generated["num_clusters"][REQUEST]
    for kv_head in range(SHAPE.num_kv_heads):
        assert cluster_members(mixed, 60, kv_head) == cluster_members(generated, 60, kv_head)


def test_centroids_are_the_means_of_their_clusters() -> None:
    algorithm, keys = make(ClusterKV, **OPTIONS), random_keys(95)
    state = represent(algorithm, keys, 80)
    for kv_head in range(SHAPE.num_kv_heads):
        for cluster, positions in cluster_members(state, 95, kv_head).items():
            if cluster != UNCLUSTERED:
                mean = keys[sorted(positions), kv_head].mean(0)
                torch.testing.assert_close(state["centroids"][REQUEST][cluster, kv_head], mean)


def test_clusters_by_direction() -> None:
    """Long and short keys of one direction share a cluster; by distance, keys of one length would."""
    directions = torch.zeros(2, SHAPE.head_size)
    directions[0, 0], directions[1, :2] = 1.0, torch.tensor([0.9, 0.4])
    lengths = torch.tensor([1.0, 10.0] * 10 + [10.0, 1.0] * 10)[:, None, None]
    keys = directions.repeat_interleave(20, 0)[:, None].expand(-1, SHAPE.num_kv_heads, -1) * lengths
    algorithm = make(ClusterKV, sink_tokens=0, tokens_per_cluster=20)
    labels = represent(algorithm, keys, 40)["labels"][REQUEST][:40, 0].tolist()
    assert labels == [labels[0]] * 20 + [1 - labels[0]] * 20


def test_an_update_clusters_as_the_prompt_would() -> None:
    """Incremental and from scratch: the interval's clusters are k-means over the interval."""
    algorithm, keys = make(ClusterKV, **OPTIONS), random_keys(60)
    state = represent(algorithm, keys, 53)
    scratch = make(ClusterKV, **{**OPTIONS, "sink_tokens": 0, "tokens_per_cluster": 4})
    alone = represent(scratch, keys[53:60], 7)
    old = -(-50 // 9)
    torch.testing.assert_close(state["labels"][REQUEST][53:60] - old, alone["labels"][REQUEST][:7])
    torch.testing.assert_close(state["centroids"][REQUEST][old : old + 2], alone["centroids"][REQUEST][:2])
    before = represent(algorithm, keys[:53], 53)
    assert torch.equal(state["labels"][REQUEST][:53], before["labels"][REQUEST][:53]), "old clusters stay"


@pytest.mark.long
@given(num_tokens=st.integers(40, 90), seed=st.integers(0, 1000), window=st.sampled_from([0, 6, 11]))
def test_takes_whole_clusters_in_the_order_of_their_centroids(num_tokens: int, seed: int, window: int) -> None:
    budget, keys, query = 30, random_keys(num_tokens, seed), random_query(seed)
    algorithm = make(ClusterKV, budget, **OPTIONS, window_tokens=window)
    state = represent(algorithm, keys, num_tokens - 4)
    selected = chosen(retrieve(algorithm, state, query, num_tokens))
    for kv_head in range(SHAPE.num_kv_heads):
        members = cluster_members(state, num_tokens, kv_head)
        taken = members.pop(UNCLUSTERED) | set(range(num_tokens - max(window, 1), num_tokens))
        centroids = {c: keys[sorted(p), kv_head].mean(0) for c, p in members.items()}
        scores = {c: float((group_of(query, kv_head) @ mean).max()) for c, mean in centroids.items()}
        for cluster in sorted(scores, key=scores.get, reverse=True):
            if len(taken | members[cluster]) > budget:
                assert taken <= selected[kv_head] <= taken | members[cluster], "the last cluster is cut"
                break
            taken |= members[cluster]
        assert len(selected[kv_head]) == min(budget, num_tokens)


def test_defaults_are_the_papers() -> None:
    options = ClusterKV.Options()
    assert (options.sink_tokens, options.tokens_per_cluster) == (16, 80)
    assert (options.update_interval, options.clusters_per_update) == (320, 4)
    assert ClusterKV.min_budget(options) == 336 and ClusterKV.num_full_kv_layers == 2
    assert options.window_tokens == 0


def test_the_budget_holds_what_is_always_attended() -> None:
    options = ClusterKV.Options(sink_tokens=3, update_interval=7)
    assert ClusterKV.min_budget(options) == 10
    assert ClusterKV.min_budget(options.model_copy(update={"window_tokens": 12})) == 15


def test_padding_adds_no_clusters() -> None:
    """Padding occurs several times in a batch, at position 0, which is clustered at once here."""
    algorithm = make(ClusterKV, max_tokens=8, sink_tokens=0, window_tokens=4, update_interval=1)
    state, padding, position = poisoned_state(algorithm, REQUEST + 1), torch.full((3,), REQUEST), torch.zeros(3).long()
    state["num_clusters"].zero_(), state["first_pending"].zero_()
    for seed in range(20):
        algorithm.update_representations(state, padding, random_keys(3, seed), position)
        algorithm.retrieve_topk(state, padding, random_query(seed).expand(3, -1, -1), position)
    assert state["num_clusters"][REQUEST] <= state["centroids"].num_entries
