"""Drafts are accepted so that what is sampled has the model's distribution."""

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens, rejection_sample

from vllm_hisparse.cpu import rejection
from vllm_hisparse.cpu.platform import HiSparseCpuPlatform

PROBS = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03])
NUM_REQUESTS = 20_000


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    HiSparseCpuPlatform.register_triton_kernel_overrides()


def metadata(temperature: torch.Tensor) -> SamplingMetadata:
    """Sampling metadata of requests with these temperatures, 0 for greedy ones."""
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=bool((temperature > 0).all()),
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.tensor([]),
        presence_penalties=torch.tensor([]),
        repetition_penalties=torch.tensor([]),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def verify(drafts: list[int], num_requests: int = NUM_REQUESTS, temperature: float = 1.0) -> torch.Tensor:
    """The same drafts of many requests, verified by vLLM's sampler: [num_requests, drafts + 1], -1 beyond the last."""
    torch.manual_seed(0)
    num_drafts = len(drafts)
    return rejection_sample(
        torch.tensor(drafts * num_requests, dtype=torch.int32),
        [num_drafts] * num_requests,
        num_drafts,
        torch.arange(1, num_requests + 1, dtype=torch.int32) * num_drafts,
        None,
        PROBS.log().repeat(num_requests * num_drafts, 1),
        torch.full((num_requests, 1), 4, dtype=torch.int32),
        metadata(torch.full((num_requests,), temperature)),
    )


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens.long(), minlength=len(PROBS)) / len(tokens)


@pytest.mark.long
@pytest.mark.parametrize("draft", [0, 2, 4, -1])
def test_tokens_have_the_models_distribution(draft: int) -> None:
    """Whatever is drafted; -1 is a placeholder."""
    tokens = verify([draft, 1])
    torch.testing.assert_close(shares(tokens[:, 0]), PROBS, rtol=0, atol=0.015)  # four standard deviations
    accepted = tokens[:, 0] == draft
    assert (tokens[~accepted, 1:] == -1).all(), "what follows a rejected draft is dropped"
    if draft >= 0:
        torch.testing.assert_close(shares(tokens[accepted, 1]), PROBS, rtol=0, atol=0.1)
        assert (tokens[accepted & (tokens[:, 1] == 1), 2] == 4).all(), "the bonus token"


@pytest.mark.long
def test_a_step_without_drafts() -> None:
    """Requests with top-k are sampled then, too."""
    sampled = metadata(torch.ones(2))
    sampled.top_k = torch.tensor([1, 2], dtype=torch.int32)
    logits, ends = torch.empty(0, 5), torch.zeros(2, dtype=torch.int32)
    assert rejection_sampler.apply_sampling_constraints(logits, ends, sampled).shape == (0, 5)


@pytest.mark.long
def test_greedy_requests_are_left_to_another_kernel() -> None:
    tokens = verify([0, 1], num_requests=3, temperature=0.0)
    assert tokens.tolist() == [[0, 0, -1]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_every_draft_has_the_parameters_of_its_request(dtype: torch.dtype) -> None:
    values, cu_num_tokens = torch.tensor([3, 0, 7], dtype=dtype), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(values, cu_num_tokens, 5).tolist() == [3, 3, 7, 7, 7]
    cu_num_tokens = torch.tensor([1, 3, 4], dtype=torch.int32)
    assert expand_batch_to_tokens(values, cu_num_tokens, 4, replace_from=0, replace_to=1).tolist() == [3, 1, 1, 7]


@pytest.mark.long
def test_drafts_that_were_not_certain() -> None:
    """Drafts come with the probabilities that a draft model gave them."""
    draft_probs = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]).repeat(NUM_REQUESTS, 1)
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(draft_probs, 1, generator=generator)[:, 0].int()
    ends, probs = torch.arange(1, NUM_REQUESTS + 1, dtype=torch.int32), PROBS.repeat(NUM_REQUESTS, 1)
    recovered, output = torch.empty_like(drafts), torch.full((NUM_REQUESTS, 2), -1, dtype=torch.int32)
    inv_q = torch.empty_like(probs).exponential_(generator=generator).reciprocal()
    uniform = torch.rand(NUM_REQUESTS, generator=generator, dtype=torch.float64)
    rejection.recover(recovered, ends, drafts, draft_probs, probs, inv_q)
    is_greedy = torch.zeros(NUM_REQUESTS, dtype=torch.bool)
    rejection.reject(output, ends, drafts, draft_probs, probs, ends, recovered, uniform, is_greedy)
    torch.testing.assert_close(shares(output[:, 0]), PROBS, rtol=0, atol=0.015)
