"""Steps are divided only where enough rows are copied to pay for it."""

from vllm_hisparse.kv_manager.blocks.step_form import MIN_COPIED_BYTES, StepForm
from vllm_hisparse.kv_manager.usage import Usage

SELECTION_BYTES = 2048 * 656  # of DeepSeek-V3.2 with KV in fp8


def test_a_step_is_divided_until_misses_are_known() -> None:
    form = StepForm(SELECTION_BYTES)
    assert not form.runs_whole(1)
    form.measured(Usage(16, 0, 0))
    assert not form.runs_whole(1), "a report without selections tells nothing"


def test_bytes_that_a_step_will_copy_decide() -> None:
    form = StepForm(SELECTION_BYTES)
    form.measured(Usage(16, 900, 100))
    most = MIN_COPIED_BYTES // (SELECTION_BYTES // 10)
    assert form.runs_whole(most) and not form.runs_whole(most + 1)
    form.measured(Usage(32, 1000, 0))
    assert form.runs_whole(128)
    form.measured(Usage(48, 0, 0))
    assert form.runs_whole(128), "a report without selections changes nothing"
    form.measured(Usage(64, 0, 1000))
    assert not form.runs_whole(2)


def test_measured_cases() -> None:
    """56 requests of 32K that miss 11% gained by microbatches; 43 that are hot as a whole lost."""
    form = StepForm(SELECTION_BYTES)
    form.measured(Usage(16, 8859, 1141))
    assert not form.runs_whole(56) and not form.runs_whole(28)
    form.measured(Usage(32, 9989, 11))
    assert form.runs_whole(43) and form.runs_whole(128)
