"""An algorithm of your own: a page is scored by the mean of its keys (docs/algorithms.md)."""

import torch

from vllm_hisparse.algorithms.base import SparseAlgorithm, StateField

PAGE = 16


class MeanPage(SparseAlgorithm):
    graph_capturable = True

    @classmethod
    def unit_tokens(cls, options):
        return PAGE

    def state_fields(self):
        sums = (self.shape.num_kv_heads, self.shape.head_size)
        return {"sums": StateField(sums, torch.float32, tokens_per_entry=PAGE)}

    def construct_representations(self, state, request_index, keys, first):
        last, first_page = first + len(keys), first // PAGE
        pages = torch.arange(first_page, -(-last // PAGE), device=keys.device)
        sums = state["sums"][request_index, pages]
        sums[-(-first // PAGE) - first_page :] = 0
        page_of_key = torch.arange(first, last, device=keys.device) // PAGE
        state["sums"][request_index, pages] = sums.index_add_(0, page_of_key - first_page, keys.float())

    def update_representations(self, state, request_indices, keys, positions):
        opens_page = (positions % PAGE == 0)[:, None, None]
        old = state["sums"][request_indices, positions // PAGE]
        state["sums"][request_indices, positions // PAGE] = keys + old.masked_fill(opens_page, 0)

    def retrieve_topk(self, state, request_indices, query, num_tokens):
        starts = torch.arange(self.max_units, device=query.device) * PAGE
        sizes = (num_tokens[:, None] - starts).clamp(1, PAGE)
        means = state["sums"][request_indices] / sizes[..., None, None]
        scores = self.group_queries(query) @ means.permute(0, 2, 3, 1)
        return self.select(scores.amax(2), num_tokens)
